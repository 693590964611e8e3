"""A codec LM whose frames are read one step late, as captured ones are: outputs are those of one read at once."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from omni_ray.engine.ar_model import FrameStep
from omni_ray.errors import StageFailedError
from tests.engine.test_ar_feeds import Ask, Pipe, Toy, collect, run, settled, source, start

__all__ = ["start"]


class AheadToy(Toy):
    """Computes at launch, and notes launches and landings in order."""

    diary: ClassVar[list[tuple[str, tuple[int, ...]]]]
    ahead = True

    def load(self) -> None:
        super().load()
        AheadToy.diary = []

    def launch(self, slots: Sequence[int], steps: Sequence[int]) -> Callable[[], FrameStep]:
        done, number = self.step(slots, steps), tuple(steps)
        self.diary.append(("launch", number))

        def land() -> FrameStep:
            self.diary.append(("land", number))
            return done

        return land


ASKS = (
    (Ask(frames=5), [1, 2], [3]),
    (Ask(frames=30, size=150), [4]),
    (Ask(), [5, 6, 7]),
    (Ask(frames=0), [1]),
    (Ask(frames=3),),
)


@pytest.mark.parametrize("together", [False, True])
async def test_outputs_are_those_of_a_model_read_at_once(start: Any, together: bool) -> None:
    results = []
    for model in (Toy, AheadToy):
        engine = await start(model, base_frames=4, frames_per_unit=2)
        work = [collect(run(engine, source(*ask), seed=n, temperature=1.0)) for n, ask in enumerate(ASKS)]
        results.append(await asyncio.gather(*work) if together else [await each for each in work])
    assert results[0] == results[1]
    assert [finish.reason for _, _, finish in results[1]] == ["stop", "length", "length", "stop", "stop"]


async def test_the_next_frame_is_launched_before_the_last_is_waited_for(start: Any) -> None:
    engine = await start(AheadToy)
    await collect(run(engine, source(Ask(frames=3), [1]), max_tokens=3))
    assert AheadToy.diary == [
        ("launch", (0,)),
        ("launch", (1,)),
        ("land", (0,)),
        ("launch", (2,)),
        ("land", (1,)),
        ("land", (2,)),
    ]


async def test_a_frame_is_given_out_though_the_next_unit_has_not_come(start: Any) -> None:
    engine, pipe = await start(AheadToy), Pipe()
    await pipe.queue.put(Ask(frames=2))
    await pipe.queue.put([11])
    outputs = run(engine, pipe.read())
    assert (await asyncio.wait_for(anext(outputs), 5)).frames[0, 0] == 11
    assert AheadToy.diary == [("launch", (0,)), ("land", (0,))]
    await outputs.aclose()


async def test_a_slot_s_next_request_hears_nothing_of_the_last_one_s_late_frame(start: Any) -> None:
    engine = await start(AheadToy, max_num_seqs=1)
    outputs = run(engine, source(Ask(), [1, 2, 3, 4, 5, 6]))
    assert (await anext(outputs)).frames[0, 0] == 1
    await outputs.aclose()
    await settled(lambda: not Toy.latest.prompts)
    units, _, _ = await collect(run(engine, source(Ask(frames=2), [8, 9])))
    assert units == [8, 9]


@pytest.mark.parametrize("broken", ["nan", "step"])
async def test_a_row_that_fails_loses_nobody_else_a_frame(start: Any, broken: str) -> None:
    engine = await start(AheadToy)
    good = [asyncio.create_task(collect(run(engine, source(Ask(frames=9), [n])))) for n in (1, 2)]
    with pytest.raises(StageFailedError if broken == "nan" else RuntimeError):
        await collect(run(engine, source(Ask(broken=broken), [1, 2, 3, 4, 5])))
    for number, task in enumerate(good, start=1):
        units, _, finish = await task
        assert (units[0], len(units), finish.reason) == (number, 9, "stop")
