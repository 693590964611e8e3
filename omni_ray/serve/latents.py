"""Large arrays between processes: inline when small, as object refs when large.

A ref is put by the process that made the data (which owns it), travels nested in an event or envelope over the actor
path, is awaited by the consumer and dropped there. Nothing frees explicitly: dropping the last ref is the release.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError

from omni_ray.engine.types import AudioClip, Chunk, Clip, ImageClip, LatentChunk, Output
from omni_ray.errors import ReplicaDiedError
from omni_ray.serve.events import OutputEvent, StoredClip

logger = logging.getLogger("ray.serve")


def large(output: Output, inline_bytes: int) -> TypeGuard[LatentChunk]:
    """Whether this output is a latent that should cross as a ref."""
    return isinstance(output, LatentChunk) and output.rows.nbytes > inline_bytes


async def store_output(stage: str, output: LatentChunk) -> OutputEvent:
    """Put the rows into the object store; the copy there is immutable, so the engine may reuse its buffer."""
    ref = await asyncio.get_running_loop().run_in_executor(None, ray.put, np.ascontiguousarray(output.rows))
    empty = np.empty((0, output.rows.shape[1]), np.float32)
    return OutputEvent(stage, replace(output, rows=empty), ref, output.rows.nbytes)


async def load_output(event: OutputEvent) -> Chunk:
    """The chunk with its rows; the array is a read-only view into the object store for as long as it lives.

    Raises:
        ReplicaDiedError: the rows are lost with the process or the node that held them.
    """
    assert isinstance(event.output, LatentChunk)
    try:
        return replace(event.output, rows=await event.ref)
    except ObjectLostError as error:
        logger.warning("a latent of stage %s is lost: %s", event.stage, type(error).__name__)
    raise ReplicaDiedError(f"a replica of stage {event.stage} died with its latents", stage=event.stage)


async def store_clips(clips: Sequence[Clip], inline_bytes: int) -> tuple[StoredClip, ...]:
    """The request's media, as refs if they are large together."""
    if sum(_array(clip).nbytes for clip in clips) <= inline_bytes:
        return tuple(StoredClip(clip) for clip in clips)
    loop = asyncio.get_running_loop()
    refs = [await loop.run_in_executor(None, ray.put, _array(clip)) for clip in clips]
    return tuple(StoredClip(_with(clip, _array(clip)[:0].copy()), ref) for clip, ref in zip(clips, refs, strict=True))


async def load_clip(stored: StoredClip) -> Clip:
    """The medium with its array; behind a ref that is a read-only view into the object store."""
    return stored.clip if stored.ref is None else _with(stored.clip, await stored.ref)


def _array(clip: Clip) -> NDArray[Any]:
    if isinstance(clip, AudioClip):
        return clip.samples
    return clip.pixels if isinstance(clip, ImageClip) else clip.frames


def _with(clip: Clip, array: NDArray[Any]) -> Clip:
    if isinstance(clip, AudioClip):
        return replace(clip, samples=array)
    return replace(clip, pixels=array) if isinstance(clip, ImageClip) else replace(clip, frames=array)
