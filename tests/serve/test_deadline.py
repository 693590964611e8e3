"""A stream's waits for messages: each has its own limit, whatever the timer was set to before."""

import asyncio
import time

import pytest

from omni_ray.serve.deadline import Deadline

pytestmark = pytest.mark.usefixtures("virtual_time")


async def test_messages_in_time_pass_and_the_one_that_is_late_does_not():
    deadline, began = Deadline(), time.monotonic()
    for _ in range(10):
        async with deadline.within(0.1):
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.15)  # a slow reader: the timer rings while nobody waits
    async with deadline.within(0.1):
        await asyncio.sleep(0.05)
    with pytest.raises(TimeoutError):
        async with deadline.within(0.1):
            await asyncio.sleep(60)
    assert time.monotonic() - began == pytest.approx(0.5)
    assert asyncio.current_task().cancelling() == 0
    async with deadline.within(0.1):  # and it goes on
        await asyncio.sleep(0)
    deadline.close()


async def test_a_shorter_limit_holds_although_the_timer_was_set_for_a_longer_one():
    deadline, began = Deadline(), time.monotonic()
    async with deadline.within(60):
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with deadline.within(0.05):
            await asyncio.sleep(60)
    assert time.monotonic() - began == pytest.approx(0.05)


async def test_a_read_puts_the_wait_off():
    deadline = Deadline()

    async def read() -> None:
        for _ in range(5):
            await asyncio.sleep(0.1)
            deadline.put_off()

    reading = asyncio.create_task(read())
    async with deadline.within(0.25):
        await asyncio.sleep(0.6)
    with pytest.raises(TimeoutError):
        async with deadline.within(0.1):
            await asyncio.sleep(60)
    await reading


@pytest.mark.parametrize("together", [False, True])
async def test_a_cancellation_from_outside_is_no_timeout(together: bool):
    deadline = Deadline()

    async def wait() -> None:
        async with deadline.within(0.05 if together else 60):
            await asyncio.sleep(60)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    if together:
        asyncio.get_running_loop().call_later(0.05, task.cancel)  # both become due in one turn of the loop
    else:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_stream_that_is_over_leaves_no_timer():
    deadline = Deadline()
    async with deadline.within(60):
        await asyncio.sleep(0)
    deadline.close()
    assert deadline._timer is None
