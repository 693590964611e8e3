"""The thinker and the talker of ``ramp``: one token per word, ``frames_per_token`` code frames per token."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

import numpy as np

from omni_ray.engine.base import EngineContext
from omni_ray.engine.per_request import PerRequestModel
from omni_ray.engine.resume import Resume
from omni_ray.engine.threads import Threads
from omni_ray.engine.types import CodeFrameChunk, Finish, LatentChunk, Output, Request, TextChunk, Usage
from omni_ray.errors import InvalidRequestError
from omni_ray.models.ramp.options import Code2WavOptions, Faults, RequestFaults, TalkerOptions, ThinkerOptions
from omni_ray.models.ramp.oracle import SAMPLES_PER_FRAME, tag_of
from omni_ray.models.ramp.processors import encode_row

SAMPLE_RATE = 24000


def faults_of(
    request: Request,
    options: ThinkerOptions | TalkerOptions | Code2WavOptions,
    stage: Literal["thinker", "talker", "code2wav"],
) -> Faults:
    """The request's own faults for ``stage`` if it brings any, else the deploy config's.

    Raises:
        InvalidRequestError: the request brings faults and the deploy config does not allow it.
    """
    extra = request.extras.get("ramp")
    if not isinstance(extra, RequestFaults):
        return options.faults
    mine = {"thinker": extra.thinker, "talker": extra.talker, "code2wav": extra.code2wav}[stage]
    if mine == Faults():
        return options.faults
    if not options.allow_request_faults:
        raise InvalidRequestError(f"faults are off: stages.{stage}.engine.allow_request_faults is false", "ramp")
    if mine.attempts is not None and request.attempt >= mine.attempts:
        return Faults()
    return mine


async def suffer(faults: Faults, unit: int, threads: Threads) -> None:
    """Whatever the knobs say happens at output ``unit``."""
    if faults.delay_ms:
        await threads.sleep(faults.delay_ms / 1000)
    if faults.kill_at == unit:
        os.kill(os.getpid(), signal.SIGKILL)
    if faults.hang_at == unit:
        await threads.sleep(1e9)
    if faults.fail_at == unit:
        raise ValueError(f"fail_at {unit}")


class RampThinker(PerRequestModel):
    """One text token and one latent row ``(tag, i)`` per word."""

    resumable = "replay"

    def load(self) -> None:
        """Nothing to load."""

    async def generate(
        self,
        request: Request,
        inputs: Mapping[str, AsyncGenerator[Any, None]],
        threads: Threads,
        resume: Resume | None = None,
    ) -> AsyncGenerator[Output, None]:
        """See ``PerRequestModel.generate``; honours ``max_tokens`` and ``stop``. Recorded tokens take no time."""
        options = self.context.options
        assert isinstance(options, ThinkerOptions)
        faults, tag = faults_of(request, options, "thinker"), tag_of(request)
        limit, stop = request.sampling.max_tokens or 2**31, request.sampling.stop or ()
        count, reason, known = 0, "stop", len(resume.token_ids) if resume else 0
        (words,) = inputs.values()
        async for word in words:
            if word.text in stop:
                break
            if count == limit:
                reason = "length"
                break
            if count >= known:
                await suffer(faults, count, threads)
            text = word.text if count == 0 else f" {word.text}"
            yield TextChunk(position=count, text=text, token_ids=(count,))
            yield LatentChunk(position=count, rows=encode_row(tag, count, options.latent_width)[None])
            count += 1
            await asyncio.sleep(0)
        yield Finish("length" if reason == "length" else "stop", Usage(prompt_tokens=count, completion_tokens=count))


class RampTalker(PerRequestModel):
    """``frames_per_token`` frames ``(tag, frame number)`` per row, then the end."""

    frame_rate = SAMPLE_RATE / SAMPLES_PER_FRAME

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        assert isinstance(context.options, TalkerOptions)
        self.resumable = "replay" if context.options.resumable else "none"
        self._loads = context.options.loads

    def load(self) -> None:
        """Nothing to load; with ``loads: false`` not even that is possible."""
        if not self._loads:
            raise ValueError("the talker's weights do not load")

    async def generate(
        self,
        request: Request,
        inputs: Mapping[str, AsyncGenerator[Any, None]],
        threads: Threads,
        resume: Resume | None = None,
    ) -> AsyncGenerator[Output, None]:
        """See ``PerRequestModel.generate``. With ``no_eos`` it stops at a cap that follows from the text's length.

        Recorded frames come at once; a talker that had ended asks nobody for rows.
        """
        options = self.context.options
        assert isinstance(options, TalkerOptions)
        faults = faults_of(request, options, "talker")
        limit = int(request.max_audio_seconds * SAMPLE_RATE / SAMPLES_PER_FRAME)
        (rows,) = inputs.values()
        known = 0
        if resume is not None and resume.frames is not None:
            known = len(resume.frames)
            yield CodeFrameChunk(0, resume.frames)
        if resume is not None and resume.finish is not None:
            yield resume.finish
            return
        frame, tag, heard, began = 0, 0, 0, time.monotonic() - known * options.pace_ms / 1000
        async for row in rows:
            tag, heard = row.tag, heard + 1
            for _ in range(options.frames_per_token):
                if frame == limit:
                    break
                if frame >= known:
                    await suffer(faults, frame, threads)
                    if options.pace_ms:
                        await threads.sleep(max(0.0, began + (frame + 1) * options.pace_ms / 1000 - time.monotonic()))
                    yield _frame(tag, frame)
                frame += 1
            await asyncio.sleep(0)
        limit = min(limit, 25 + 10 * heard * options.frames_per_token)
        while faults.no_eos and frame < limit:
            if frame >= known:
                yield _frame(tag, frame)
            frame += 1
            await asyncio.sleep(0)
        yield Finish("length" if frame == limit else "stop", Usage(audio_tokens=frame))


def _frame(tag: int, number: int) -> CodeFrameChunk:
    return CodeFrameChunk(position=number, frames=np.array([[tag, number]], np.int64))
