"""The listener: Whisper tiny.en through faster-whisper, clips in, transcript segments out as they are recognised."""

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, Final

import numpy as np
from faster_whisper import WhisperModel
from numpy.typing import NDArray

from omni_ray.engine.per_request import PerRequestModel
from omni_ray.engine.resume import Resume
from omni_ray.engine.threads import Threads
from omni_ray.engine.types import AudioClip, Finish, Output, Request, TranscriptChunk, Usage
from omni_ray.models.voice_chat.checkpoint import listener_directory
from omni_ray.models.voice_chat.options import ListenerOptions

SAMPLE_RATE: Final = 16000
SAMPLES_PER_TOKEN: Final = 320
"""Whisper's encoder makes a position of every 20 ms; that is what usage counts as an audio token."""
FRAMES_PER_S: Final = 100


class ShortWhisper(WhisperModel):  # type: ignore[misc]  # upstream has no types
    """faster-whisper's ``WhisperModel``, whose ``encode`` pads every window to 30 s; this one to ``context_s``.

    A window that is longer than ``context_s`` less ``MARGIN_S`` is padded to 30 s all the same: Whisper repeats itself
    when no silence follows the speech.
    """

    MARGIN_S: Final = 8

    def __init__(self, path: str, context_s: int, **options: Any) -> None:
        super().__init__(path, **options)
        self._context_s = context_s

    def encode(self, features: NDArray[np.float32]) -> Any:
        """Encoder states of log-mel ``features`` float32 [80, 3000], zero where padded."""
        if not features[:, (self._context_s - self.MARGIN_S) * FRAMES_PER_S :].any():
            features = np.ascontiguousarray(features[:, : self._context_s * FRAMES_PER_S])
        return super().encode(features)


class WhisperListener(PerRequestModel):
    """``AudioClip`` at 16 kHz in, ``TranscriptChunk`` out; one per segment, ``text`` without spaces around it.

    Only temperature 0: the same clip always gives the same text, and a bad window costs one attempt, not six. Windows
    are not conditioned on earlier text, so that one bad window does not spoil the next. Segments without a letter or
    digit are dropped (of silence Whisper may make "."): silence has an empty transcript.

    Usage counts 20 ms encoder positions of sound as prompt tokens, and text tokens as completion tokens.

    A request that goes on after its replica died is heard again, unless all of it had been heard.
    """

    resumable = "replay"

    def load(self) -> None:
        """Verify and load the model and warm up.

        Raises:
            ConfigError: the package with the weights is missing, or they are not the known ones.
        """
        options = self.context.options
        assert isinstance(options, ListenerOptions)
        self._beam_size = options.beam_size
        self._whisper = ShortWhisper(
            str(listener_directory()),
            context_s=options.context_s,
            device="cpu",
            compute_type=options.compute_type,
            cpu_threads=options.cpu_threads,
            num_workers=options.threads,
        )
        self._first_special = int(self._whisper.hf_tokenizer.token_to_id("<|endoftext|>"))
        hum = np.sin(np.arange(SAMPLE_RATE, dtype=np.float32)) * np.float32(0.1)
        for _ in self._segments(hum):
            pass

    async def generate(
        self,
        request: Request,
        inputs: Mapping[str, AsyncGenerator[Any, None]],
        threads: Threads,
        resume: Resume | None = None,
    ) -> AsyncGenerator[Output, None]:
        """See ``PerRequestModel.generate``; cancelling takes effect between segments."""
        if resume is not None and resume.finish is not None:
            for known in resume.transcripts:
                yield known
            yield resume.finish
            return
        position = heard = spoken = 0
        for source in inputs.values():
            async for clip in source:
                assert isinstance(clip, AudioClip)
                assert clip.sample_rate == SAMPLE_RATE
                heard += -(-len(clip.samples) // SAMPLES_PER_TOKEN)
                segments = await threads.run(self._segments, clip.samples)
                while (segment := await threads.run(next, segments, None)) is not None:
                    text = segment.text.strip()
                    if not any(map(str.isalnum, text)):
                        continue
                    spoken += sum(token < self._first_special for token in segment.tokens)
                    yield TranscriptChunk(position, clip.index, text, float(segment.start), float(segment.end))
                    position += 1
        yield Finish(usage=Usage(prompt_tokens=heard, completion_tokens=spoken))

    def _segments(self, samples: NDArray[np.float32]) -> Iterator[Any]:
        """faster-whisper's lazy segments of float32 [n] at 16 kHz: features are computed here, the rest by ``next``.

        It takes window after window of 30 s and goes on where the last whole segment ended, so nothing is lost at a
        window's border (cases.md C32).
        """
        if len(samples) == 0:
            return iter(())
        segments, _ = self._whisper.transcribe(
            samples,
            language="en",
            beam_size=self._beam_size,
            temperature=0.0,
            condition_on_previous_text=False,
        )
        return iter(segments)
