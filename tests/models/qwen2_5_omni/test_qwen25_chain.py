"""The three stages and the processors between them, in one process: what upstream's ``generate`` gives in one piece."""

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from qwen25_upstream import CHATS, TOKENS, monolith, padded, upstream_inputs

from omni_ray.config.pipeline import StagePipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.ar import AREngine
from omni_ray.engine.base import Engine, EngineContext
from omni_ray.engine.codec import CodecEngine
from omni_ray.engine.options import AROptions
from omni_ray.engine.types import AudioChunk, CodeFrameChunk, Finish, PromptChunk, Request, TextChunk
from omni_ray.models.qwen2_5_omni.latent_engine import LatentTextEngine
from omni_ray.models.qwen2_5_omni.options import TalkerOptions, Token2WavOptions
from omni_ray.models.qwen2_5_omni.pipeline import TALKER, THINKER, TOKEN2WAV
from omni_ray.models.qwen2_5_omni.processors import codes_of_talker, talker_inputs
from omni_ray.models.qwen2_5_omni.prompt import ChatPrompt
from omni_ray.models.qwen2_5_omni.talker import Qwen2_5OmniTalker
from omni_ray.models.qwen2_5_omni.thinker import Qwen2_5OmniThinker
from omni_ray.models.qwen2_5_omni.tiny_config import PAD
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


async def test_text_codes_and_sound_equal_upstream(tiny25: Path, upstream25: Any) -> None:
    pytest.importorskip("PIL")
    voices = []
    async with Chain(tiny25) as plain, Chain(tiny25, deterministic=True) as fixed:
        for name, prompt in CHATS.items():
            await plain.run(prompt)
            (asked,) = plain.all(PromptChunk)
            inputs = padded(upstream_inputs(tiny25, prompt, asked.token_ids))
            text, codes, sound = monolith(upstream25, inputs, FRAMES, SEED)
            assert len(set(codes[:, 0].tolist())) > 5
            assert 0.01 < np.sqrt(np.mean(sound**2)) < np.abs(sound).max() < 1
            if name in ("text", "image"):
                await fixed.run(prompt)
            for chain in (plain, fixed) if name in ("text", "image") else (plain,):
                assert chain.text() == text, name
                assert np.array_equal(chain.codes(), codes), name
                assert chain.sound().shape == sound.shape == (480 * FRAMES,)
                assert np.abs(chain.sound() - sound).max() < 1e-5
            voices.append(sound)
    assert all(np.abs(one - other).max() > 0.01 for one, other in itertools.pairwise(voices))


def first_new(values: list[int], start: int) -> int:
    """The first value from ``start`` on that has not appeared before it."""
    return next(value for at, value in enumerate(values) if at >= start and value not in values[:at])


async def test_text_and_codes_may_end_in_mid_stream(tiny25: Path, upstream25: Any, tmp_path: Path) -> None:
    """A stop token is not spoken, every token before it is; a codec end, or padding, gives no frame."""
    async with Chain(tiny25) as chain:
        await chain.run(CHATS["text"])
        (asked,) = chain.all(PromptChunk)
        end = first_new(chain.text(), 4)
        # One token at most: nobody computes it, so there is nothing to say.
        await chain.run(CHATS["text"], max_tokens=1)
        assert len(chain.text()) == 1
        assert len(chain.codes()) == len(chain.sound()) == 0
        assert [finish.reason for finish in chain.all(Finish)] == ["length", "stop", "stop"]
        # One code is 20 ms of sound.
        await chain.run(CHATS["text"], frames=1, max_tokens=2)
        assert (len(chain.codes()), len(chain.sound())) == (1, 480)
    inputs = padded(upstream_inputs(tiny25, CHATS["text"], asked.token_ids))
    _, codes, _ = monolith(upstream25, inputs, FRAMES, SEED, end=end)
    said = codes[:, 0].tolist()
    stop = max(set(said), key=said.index)  # the code that is said last for the first time
    assert said.index(stop) >= 3

    shutil.copytree(tiny25, tmp_path / "ending")
    config = json.loads((tiny25 / "config.json").read_text())
    config["talker_config"]["tts_codec_end_token_id"] = stop
    (tmp_path / "ending/config.json").write_text(json.dumps(config))
    (tmp_path / "ending/generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    text, codes, sound = monolith(upstream25, inputs, FRAMES, SEED, end=end, talker_eos_token_id=[PAD, stop])
    async with Chain(tmp_path / "ending") as chain:
        await chain.run(CHATS["text"])
    assert chain.text() == text[:-1]
    assert len(codes) == said.index(stop)
    assert np.array_equal(chain.codes(), codes)
    assert np.abs(chain.sound() - sound).max() < 1e-5
    assert [finish.reason for finish in chain.all(Finish)] == ["stop"] * 3
