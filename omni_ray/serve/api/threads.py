"""CPU work off the event loop, which never outlives the call: what the thread uses may be closed right afterwards."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like ``asyncio.to_thread``; a cancellation waits for the thread, so no encoder is freed under it (C12)."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError:
                continue
        if not running.cancelled():
            running.exception()
        raise
