"""The three stages and the processors between them, in one process: what upstream's ``generate`` gives in one piece."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import CHATS, PICTURE_CHATS, upstream_inputs
from numpy.typing import NDArray

from omni_ray.config.pipeline import StagePipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.ar import AREngine
from omni_ray.engine.base import Engine, EngineContext
from omni_ray.engine.codec import CodecEngine
from omni_ray.engine.options import AROptions
from omni_ray.engine.types import AudioChunk, CodeFrameChunk, Finish, MediaPart, PromptChunk, Request, TextChunk
from omni_ray.models.qwen3_omni.code2wav import Qwen3OmniCode2Wav
from omni_ray.models.qwen3_omni.options import Code2WavOptions, TalkerOptions
from omni_ray.models.qwen3_omni.pipeline import CODE2WAV, TALKER, THINKER
from omni_ray.models.qwen3_omni.processors import frames_of_talker, talker_inputs
from omni_ray.models.qwen3_omni.prompt import ChatPrompt
from omni_ray.models.qwen3_omni.talker import Qwen3OmniTalker
from omni_ray.models.qwen3_omni.thinker import Qwen3OmniThinker

TOKENS = 14
CASES = [(name, 27) for name in (*CHATS, *PICTURE_CHATS)] + [("several turns", 330)]


class Chain:
    """Three engines; remembers, in order, what came out of each."""

    def __init__(self, directory: Path) -> None:
        def context(stage: StagePipelineConfig, model_cls: type, options: Any) -> EngineContext:
            return EngineContext(stage, str(directory), model_cls, options, progress=lambda line: None)

        fast = {"max_num_seqs": 2, "max_model_len": 700, "threads": 1, "dtype": "float32"}
        self.thinker = AREngine(context(THINKER, Qwen3OmniThinker, AROptions(**fast)))
        speech = TalkerOptions(**fast, base_frames=400)
        self.talker = AREngine(context(TALKER, Qwen3OmniTalker, speech))
        self.code2wav = CodecEngine(context(CODE2WAV, Qwen3OmniCode2Wav, Code2WavOptions()))
        self.log: list[Any] = []

    async def _noted(self, engine: Engine, request: Request, source: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for output in engine.generate(request, {"source": source}):
            self.log.append(output)
            if not isinstance(output, Finish):
                yield output

    async def answer(self, prompt: ChatPrompt, frames: int, tokens: int = TOKENS) -> None:
        """Start, answer one chat greedily with at most ``tokens`` tokens and ``frames`` frames, stop."""
        engines = (self.thinker, self.talker, self.code2wav)
        await asyncio.gather(*(engine.start() for engine in engines))
        try:
            await self._run(prompt, frames, tokens)
        finally:
            await asyncio.gather(*(engine.stop() for engine in engines))

    async def _run(self, prompt: ChatPrompt, frames: int, tokens: int) -> None:
        async def asked() -> AsyncIterator[ChatPrompt]:
            yield prompt

        written = SamplingParams(temperature=0, max_tokens=tokens)
        spoken = SamplingParams(temperature=0, max_tokens=frames, repetition_penalty=1.05)
        writer, speaker = (Request("r", seed=1, voice="Ethan", sampling=sampling) for sampling in (written, spoken))
        text = self._noted(self.thinker, writer, asked())
        codes = self._noted(self.talker, speaker, talker_inputs(speaker, text))
        async for _ in self._noted(self.code2wav, speaker, frames_of_talker(speaker, codes)):
            pass

    def outputs(self, kind: type) -> list[Any]:
        return [output for output in self.log if isinstance(output, kind)]


@torch.no_grad()
def monolith(
    upstream: Any, inputs: dict[str, Any], grids: Any, frames: int, end: int | None = None
) -> tuple[list[int], torch.Tensor]:
    """Text, and codes int64 [1, codebooks, frames] on their way to code2wav.

    ``grids`` are those of images in user turns: left to itself, upstream hands its talker those of all turns, in the
    wrong order. Nor does it tell its talker of ``use_audio_in_video``, without which positions there would not fit.
    """
    config, kept = upstream.config, []
    decode = upstream.code2wav.chunked_decode
    # Upstream's talker has no audio config, which its rope positions of sound beside images need.
    config.talker_config.audio_config = config.thinker_config.audio_config
    upstream.code2wav.chunked_decode = lambda codes, **_: kept.append(codes) or torch.zeros(1)
    own: dict[str, Any] = {"talker_image_grid_thw": torch.tensor([grid[:3] for grid in grids])} if grids else {}
    if "use_audio_in_video" in inputs:
        own["talker_use_audio_in_video"] = inputs["use_audio_in_video"]
    try:
        sequences, _ = upstream.generate(
            **inputs,
            **own,
            speaker="ethan",
            return_audio=True,
            thinker_max_new_tokens=TOKENS,
            thinker_eos_token_id=config.im_end_token_id if end is None else end,
            thinker_do_sample=False,
            talker_do_sample=False,
            talker_max_new_tokens=frames + 1,
        )
    finally:
        upstream.code2wav.chunked_decode = decode
    return sequences[0, inputs["input_ids"].shape[1] :].tolist(), kept[0]


def kinds_in_user_turns(prompt: ChatPrompt) -> list[str]:
    parts = [part for message in prompt.messages if message.role == "user" for part in message.content]
    return [part.kind for part in parts if isinstance(part, MediaPart) and part.kind != "audio"]


def whole(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts)


@pytest.mark.parametrize(("name", "frames"), CASES)
async def test_text_codes_and_sound_equal_upstream(
    name: str, frames: int, tiny_checkpoint: Path, upstream: Any
) -> None:
    if name in PICTURE_CHATS:
        pytest.importorskip("PIL")
    prompt = {**CHATS, **PICTURE_CHATS}[name]
    chain = Chain(tiny_checkpoint)
    await chain.answer(prompt, frames)
    (asked,) = chain.outputs(PromptChunk)
    inputs = upstream_inputs(tiny_checkpoint, prompt, asked.token_ids)
    images = [grid for grid, kind in zip(asked.grids, kinds_in_user_turns(prompt), strict=True) if kind == "image"]
    text, codes = monolith(upstream, inputs, images, frames)
    assert [token for chunk in chain.outputs(TextChunk) for token in chunk.token_ids] == text
    ours = whole([chunk.frames for chunk in chain.outputs(CodeFrameChunk)])
    assert ours.shape == (frames, 4)
    assert np.array_equal(ours.T, codes[0].numpy())
    with torch.no_grad():
        reference = upstream.code2wav(codes)[0, 0].numpy()
    sound = whole([chunk.samples for chunk in chain.outputs(AudioChunk)])
    assert len(sound) == len(reference) == 1920 * frames - 555
    assert np.sqrt(np.mean(reference**2)) > 0.01
    assert np.abs(reference).max() < 1
    assert np.abs(sound - reference).max() < 1e-5 * np.abs(reference).max()


def first_new(values: list[int], start: int) -> int:
    """The first value from ``start`` on that has not appeared before it."""
    return next(value for at, value in enumerate(values) if at >= start and value not in values[:at])


async def test_text_and_codes_may_end_in_mid_stream(tiny_checkpoint: Path, upstream: Any, tmp_path: Path) -> None:
    """A stop token is not spoken, every token before it is; a codec end gives no frame."""
    plain = Chain(tiny_checkpoint)
    await plain.answer(CHATS["text"], 27)
    (asked,) = plain.outputs(PromptChunk)
    inputs = upstream_inputs(tiny_checkpoint, CHATS["text"], asked.token_ids)
    text, _ = monolith(upstream, inputs, (), 2)
    end = first_new(text, 4)
    _, codes = monolith(upstream, inputs, (), 27, end)
    codec_end = first_new(codes[0, 0].tolist(), 12)

    shutil.copytree(tiny_checkpoint, tmp_path / "ending")
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    config["talker_config"]["codec_eos_token_id"] = codec_end
    (tmp_path / "ending/config.json").write_text(json.dumps(config))
    (tmp_path / "ending/generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    chain = Chain(tmp_path / "ending")
    await chain.answer(CHATS["text"], 27)

    talker = upstream.config.talker_config
    kept, talker.codec_eos_token_id = talker.codec_eos_token_id, codec_end
    try:
        text, codes = monolith(upstream, inputs, (), 27, end)
    finally:
        talker.codec_eos_token_id = kept
    assert 12 <= codes.shape[-1] < 27
    assert [token for chunk in chain.outputs(TextChunk) for token in chunk.token_ids] == text[:-1]
    assert np.array_equal(whole([chunk.frames for chunk in chain.outputs(CodeFrameChunk)]).T, codes[0].numpy())
    assert [finish.reason for finish in chain.outputs(Finish)] == ["stop"] * 3


async def test_the_talker_speaks_before_the_thinker_is_done(tiny_checkpoint: Path) -> None:
    chain = Chain(tiny_checkpoint)
    await chain.answer(CHATS["text"], 27, tokens=200)
    kinds = [type(output) for output in chain.log]
    assert kinds.index(CodeFrameChunk) < len(kinds) - 1 - kinds[::-1].index(TextChunk)
