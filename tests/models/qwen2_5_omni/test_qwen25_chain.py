"""The three stages and the processors between them, in one process: what upstream's ``generate`` gives in one piece."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from qwen25_upstream import CHATS, TOKENS, padded, upstream_inputs

from omni_ray.config.pipeline import StagePipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.ar import AREngine
from omni_ray.engine.base import Engine, EngineContext
from omni_ray.engine.codec import CodecEngine
from omni_ray.engine.options import AROptions
from omni_ray.engine.types import AudioChunk, CodeFrameChunk, Finish, PromptChunk, Request, TextChunk
from omni_ray.models.qwen2_5_omni.flow import start_noise
from omni_ray.models.qwen2_5_omni.latent_engine import LatentTextEngine
from omni_ray.models.qwen2_5_omni.options import TalkerOptions, Token2WavOptions
from omni_ray.models.qwen2_5_omni.pipeline import TALKER, THINKER, TOKEN2WAV
from omni_ray.models.qwen2_5_omni.processors import codes_of_talker, talker_inputs
from omni_ray.models.qwen2_5_omni.prompt import ChatPrompt
from omni_ray.models.qwen2_5_omni.talker import Qwen2_5OmniTalker
from omni_ray.models.qwen2_5_omni.thinker import Qwen2_5OmniThinker
from omni_ray.models.qwen2_5_omni.tiny_config import EOS, MEL, PAD
from omni_ray.models.qwen2_5_omni.token2wav import Qwen2_5OmniToken2Wav

FRAMES = 27
SEED = 5


class Chain:
    """Three engines; remembers, in order, what came out of each."""

    def __init__(self, directory: Path, **options: Any) -> None:
        def context(stage: StagePipelineConfig, model_cls: type, options: Any) -> EngineContext:
            return EngineContext(stage, str(directory), model_cls, options, progress=lambda line: None)

        fast = {"max_num_seqs": 2, "max_model_len": 700, "threads": 1, "dtype": "float32", **options}
        self.thinker = LatentTextEngine(context(THINKER, Qwen2_5OmniThinker, AROptions(**fast)))
        self.talker = AREngine(context(TALKER, Qwen2_5OmniTalker, TalkerOptions(**fast)))
        self.token2wav = CodecEngine(context(TOKEN2WAV, Qwen2_5OmniToken2Wav, Token2WavOptions()))
        self.log: list[Any] = []

    async def __aenter__(self) -> "Chain":
        await asyncio.gather(*(engine.start() for engine in (self.thinker, self.talker, self.token2wav)))
        return self

    async def __aexit__(self, *_: Any) -> None:
        await asyncio.gather(*(engine.stop() for engine in (self.thinker, self.talker, self.token2wav)))

    async def _noted(self, engine: Engine, request: Request, source: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for output in engine.generate(request, {"source": source}):
            self.log.append(output)
            if not isinstance(output, Finish):
                yield output

    async def run(self, prompt: ChatPrompt, frames: int = FRAMES, **more: Any) -> None:
        """Answer one chat greedily."""

        async def asked() -> AsyncIterator[ChatPrompt]:
            yield prompt

        self.log = []
        spoken = SamplingParams(temperature=0, max_tokens=frames, repetition_penalty=1.05)
        speaker = Request("r", seed=SEED, voice="ethan", sampling=spoken)
        writer = replace(speaker, sampling=SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, **more}))
        text = self._noted(self.thinker, writer, asked())
        codes = self._noted(self.talker, speaker, talker_inputs(speaker, text))
        async for _ in self._noted(self.token2wav, speaker, codes_of_talker(speaker, codes)):
            pass

    def all(self, kind: type) -> list[Any]:
        return [output for output in self.log if isinstance(output, kind)]

    def text(self) -> list[int]:
        return [token for chunk in self.all(TextChunk) for token in chunk.token_ids]

    def codes(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros((0, 1), np.int64), *(chunk.frames for chunk in self.all(CodeFrameChunk))])

    def sound(self) -> NDArray[np.float32]:
        return np.concatenate([np.zeros(0, np.float32), *(chunk.samples for chunk in self.all(AudioChunk))])


@torch.no_grad()
def monolith(
    upstream: Any, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, end: int | None = None, **more: Any
) -> tuple[list[int], NDArray[np.int64], NDArray[np.float32]]:
    """Text, codes and sound of one upstream ``generate``, which starts its diffusion from our noise."""
    kept: list[NDArray[np.int64]] = []
    sample = upstream.token2wav.code2wav_dit_model.sample

    def sampled(conditioning: Any, mel: Any, codes: Any, **options: Any) -> Any:
        kept.append(codes[0, :, None].numpy())
        noise = torch.from_numpy(start_noise(SEED, 2 * codes.shape[1], MEL))[None]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randn", lambda *_, **__: noise)
            return sample(conditioning, mel, codes, **options)

    monkeypatch.setattr(upstream.token2wav.code2wav_dit_model, "sample", sampled)
    sequences, sound = upstream.generate(
        **inputs,
        speaker="Ethan",
        thinker_max_new_tokens=TOKENS,
        thinker_do_sample=False,
        thinker_eos_token_id=end,
        talker_do_sample=False,
        **{"talker_max_new_tokens": FRAMES, "talker_eos_token_id": [PAD, EOS], **more},
    )
    return sequences[0, inputs["input_ids"].shape[1] :].tolist(), kept[0], sound.numpy()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_text_codes_and_sound_equal_upstream(
    deterministic: bool, tiny25: Path, upstream25: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    voices = []
    async with Chain(tiny25, deterministic=deterministic) as chain:
        for name, prompt in CHATS.items():
            await chain.run(prompt)
            (asked,) = chain.all(PromptChunk)
            inputs = padded(upstream_inputs(tiny25, prompt, asked.token_ids))
            text, codes, sound = monolith(upstream25, inputs, monkeypatch)
            assert chain.text() == text, name
            assert np.array_equal(chain.codes(), codes), name
            assert len(set(codes[:, 0].tolist())) > 5
            ours = chain.sound()
            assert ours.shape == sound.shape == (480 * FRAMES,)
            assert 0.01 < np.sqrt(np.mean(sound**2)) < np.abs(sound).max() < 1
            assert np.abs(ours - sound).max() < 1e-5
            voices.append(ours)
    assert all(np.abs(one - other).max() > 0.01 for one, other in itertools.pairwise(voices))
