"""Mimi's decoder in chunks against one ``MimiModel.decode`` call, on a tiny random checkpoint."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from omni_ray.engine.base import EngineContext
from omni_ray.engine.codec import CodecEngine
from omni_ray.engine.options import FrameCodecOptions
from omni_ray.errors import ConfigError, StageFailedError
from omni_ray.models.csm.code2wav import CsmCode2Wav
from omni_ray.models.csm.pipeline import PIPELINE
from tests.models.codec_streams import Codes, Sound, assert_equal_sound, frames, sound
from tests.models.csm.test_csm_talker import changed

pytestmark = pytest.mark.asyncio(loop_scope="module")

FRAME = 1920


def engine(model: Path, **options: Any) -> CodecEngine:
    given = FrameCodecOptions.model_validate({"threads": 1, **options})
    stage = PIPELINE.stage("code2wav")
    return CodecEngine(EngineContext(stage=stage, model=str(model), model_cls=CsmCode2Wav, options=given))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started(tiny: Path) -> AsyncIterator[CodecEngine]:
    made = engine(tiny, chunk_frames=[1, 3, 7])
    await made.start()
    yield made
    await made.stop()


def one_call(upstream: Any, codes: Codes) -> Sound:
    with torch.no_grad():
        decoded = upstream.codec_model.decode(torch.from_numpy(codes.T)[None], return_dict=True).audio_values
    made: Sound = decoded[0, 0].numpy()
    return made


@pytest.mark.parametrize("count", [1, 2, 29, 320])
async def test_a_stream_equals_one_call(started: CodecEngine, upstream: Any, count: int):
    """320 frames are 640 positions, 13 times the attention's window."""
    codes = frames(count)
    stream = await sound(started, codes)
    assert len(stream) == FRAME * count
    assert_equal_sound(stream, one_call(upstream, codes))


async def test_streams_of_different_ages_share_batches(started: CodecEngine, upstream: Any):
    many = [frames(20 + 9 * k, seed=k) for k in range(8)]
    streams = await asyncio.gather(*(sound(started, codes, 1 + k) for k, codes in enumerate(many)))
    for stream, codes in zip(streams, many, strict=True):
        assert_equal_sound(stream, one_call(upstream, codes))


async def test_deterministic_alone_equals_a_crowd(tiny: Path):
    made = engine(tiny, deterministic=True)
    await made.start()
    many = [frames(20 + 9 * k, seed=k) for k in range(8)]
    alone = [await sound(made, codes) for codes in many]
    crowd = await asyncio.gather(*(sound(made, codes) for codes in many))
    for one, other in zip(alone, crowd, strict=True):
        np.testing.assert_array_equal(one, other)
    await made.stop()


async def test_a_wrong_code_fails_its_request_alone(started: CodecEngine, upstream: Any):
    wrong, good = frames(6), frames(12, seed=1)
    wrong[4, 3] = 32
    results = await asyncio.gather(sound(started, wrong), sound(started, good), return_exceptions=True)
    assert isinstance(results[0], StageFailedError)
    assert "code 32 is not in a codebook of 32" in str(results[0])
    assert isinstance(results[1], np.ndarray)
    assert_equal_sound(results[1], one_call(upstream, good))


async def test_a_missing_tensor_stops_the_start(tiny: Path, tmp_path: Path):
    name = "codec_model.decoder.layers.0.conv.weight"
    with pytest.raises(ConfigError, match=f"1 tensors are missing: {name}"):
        await engine(changed(tiny, tmp_path / "broken", name, None)).start()


async def test_a_codec_that_does_not_fit_stops_the_start(tiny: Path, tmp_path: Path):
    other = changed(tiny, tmp_path / "other", "lm_head.weight", lambda t: t)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"sampling_rate": 24000', '"sampling_rate": 16000'))
    with pytest.raises(ConfigError, match=r"codec_config\.sampling_rate is 16000, not 24000"):
        await engine(other).start()
