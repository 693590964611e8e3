"""Higgs Audio v2's codec: chunks against one call, and against upstream's class where torchaudio can be imported."""

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
from omni_ray.engine.types import CodeFrameChunk, Request
from omni_ray.errors import ConfigError, StageFailedError
from omni_ray.models.higgs_audio_v2.code2wav import HiggsCode2Wav
from omni_ray.models.higgs_audio_v2.codec_modules import CodecDecoder, CodecEncoder
from omni_ray.models.higgs_audio_v2.codec_weights import load_half
from omni_ray.models.higgs_audio_v2.delay import Realigned, delayed
from omni_ray.models.higgs_audio_v2.options import HiggsCodecOptions
from omni_ray.models.higgs_audio_v2.pipeline import PIPELINE
from omni_ray.models.higgs_audio_v2.processors import frames_of_talker
from omni_ray.models.higgs_audio_v2.stage_checkpoint import codec_checkpoint
from tests.models.codec_streams import assert_equal_sound, frames, sound

pytestmark = pytest.mark.asyncio(loop_scope="module")

FRAME = 960


def context(model: Path, **options: Any) -> EngineContext:
    given = HiggsCodecOptions.model_validate({"threads": 1, **options})
    return EngineContext(PIPELINE.stage("code2wav"), str(model), HiggsCode2Wav, given)


def half(model: Path, which: Any) -> Any:
    made = context(model)
    return load_half(which, *codec_checkpoint(made, None), made)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started(tiny: Path) -> AsyncIterator[CodecEngine]:
    made = CodecEngine(context(tiny, chunk_frames=[1, 3, 7]))
    await made.start()
    yield made
    await made.stop()


async def test_streams_of_different_ages_equal_one_call(tiny: Path, started: CodecEngine):
    decoder = half(tiny, CodecDecoder)
    many = [frames(count, seed=k) for k, count in enumerate((1, 2, 11, 29, 58, 320))]
    streams = await asyncio.gather(*(sound(started, codes, 1 + k) for k, codes in enumerate(many)))
    for stream, codes in zip(streams, many, strict=True):
        with torch.no_grad():
            whole = decoder(torch.from_numpy(codes)[None])[0].numpy()
        assert len(whole) == FRAME * len(codes)
        assert_equal_sound(stream, whole)


async def test_one_frame_less_of_context_is_heard(tiny: Path):
    """The contexts are no larger than they must be, and no smaller."""
    decoder, codes = half(tiny, CodecDecoder), frames(40)
    left, right = decoder.context()
    assert (left, right) == (10, 10)
    with torch.no_grad():
        whole = decoder(torch.from_numpy(codes)[None])[0][20 * FRAME : 21 * FRAME]
        for cut, same in ((0, True), (1, False)):
            part = codes[20 - left + cut : 21 + right]
            made = decoder(torch.from_numpy(part)[None])[0][(left - cut) * FRAME : (left - cut + 1) * FRAME]
            assert (float((made - whole).abs().max() / whole.abs().max()) <= 1e-5) == same
            part = codes[20 - left : 21 + right - cut]
            made = decoder(torch.from_numpy(part)[None])[0][left * FRAME : (left + 1) * FRAME]
            assert (float((made - whole).abs().max() / whole.abs().max()) <= 1e-5) == same


async def test_deterministic_alone_equals_a_crowd(tiny: Path):
    made = CodecEngine(context(tiny, deterministic=True))
    await made.start()
    many = [frames(20 + 9 * k, seed=k) for k in range(8)]
    alone = [await sound(made, codes) for codes in many]
    for one, other in zip(alone, await asyncio.gather(*(sound(made, codes) for codes in many)), strict=True):
        np.testing.assert_array_equal(one, other)
    await made.stop()


async def test_a_wrong_frame_fails_its_request_alone(started: CodecEngine):
    wrong, good = frames(30), frames(30, seed=1)
    wrong[4, 3] = -1
    results = await asyncio.gather(sound(started, wrong), sound(started, good), return_exceptions=True)
    assert isinstance(results[0], StageFailedError)
    assert isinstance(results[1], np.ndarray)
    # ids of the talker that the codec lacks are its last code, as upstream's processor has it
    high, last = good.copy(), good.copy()
    high[3, 2], last[3, 2] = 33, 31
    np.testing.assert_array_equal(await sound(started, high), await sound(started, last))


async def test_too_little_left_context_is_refused(tiny: Path):
    with pytest.raises(ConfigError, match=r"engine\.left_context: 5 is below 10"):
        await CodecEngine(context(tiny, left_context=5)).start()


@pytest.mark.parametrize("at_once", [1, 3, 50])
async def test_the_delay_is_taken_out_whatever_the_pieces(at_once: int):
    codes = frames(20)
    rows = delayed(codes, 32, 33)
    assert rows.shape == (29, 8)
    assert (rows[0] == 32).all()
    assert (rows[-1] == 33).all()

    async def chunks() -> AsyncIterator[CodeFrameChunk]:
        for start in range(1, len(rows) - 1, at_once):  # as the talker gives them out: neither first nor last row
            yield CodeFrameChunk(start - 1, rows[start : start + at_once][: len(rows) - 1 - start])

    made = [chunk async for chunk in frames_of_talker(Request("r", seed=0), chunks())]
    np.testing.assert_array_equal(np.concatenate([c.frames for c in made]), codes)
    assert [c.position for c in made] == np.cumsum([0, *(len(c.frames) for c in made)])[:-1].tolist()
    assert Realigned().push(rows[:5]).shape == (0, 8)


async def test_both_halves_equal_upstreams_class(tiny: Path):
    """Opt-in: upstream's module imports torchaudio, whose published builds want CUDA's libraries."""
    try:
        import torchaudio  # noqa: F401
    except (ImportError, OSError) as error:
        pytest.skip(f"torchaudio cannot be imported here: {error}")
    from transformers import HiggsAudioV2TokenizerModel

    upstream: Any = HiggsAudioV2TokenizerModel.from_pretrained(tiny / "audio_tokenizer").eval()
    encoder, decoder, noise = half(tiny, CodecEncoder), half(tiny, CodecDecoder), np.random.default_rng(0)
    with torch.no_grad():
        for samples in (960, 12_345, 21_600, 50_000):
            heard = torch.from_numpy(noise.standard_normal(samples).astype(np.float32) * 0.1)
            codes = encoder(heard)
            assert torch.equal(codes, upstream.encode(heard[None, None]).audio_codes[0].T)
            whole = upstream.decode(codes.T[None]).audio_values[0, 0].numpy()
            assert_equal_sound(decoder(codes[None])[0].numpy(), whole)
