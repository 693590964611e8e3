"""code2wav: the stream equals one upstream call, on the tiny checkpoint and at the published shape."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_ray.config.pipeline import Edge, StageExecutionType, StagePipelineConfig
from omni_ray.engine.base import EngineContext
from omni_ray.engine.codec import CodecEngine, DecodeItem
from omni_ray.engine.types import AudioChunk, CodeFrameChunk, Finish, Request
from omni_ray.errors import ConfigError, StageFailedError
from omni_ray.models.qwen3_omni.checkpoint import PUBLISHED
from omni_ray.models.qwen3_omni.code2wav import Qwen3OmniCode2Wav
from omni_ray.models.qwen3_omni.options import Code2WavOptions
from omni_ray.models.qwen3_omni.streaming_code2wav import StreamingCode2Wav, tail_samples
from omni_ray.models.qwen3_omni.truncated_code2wav import TruncatedCode2Wav

TOLERANCE = 1e-5
"""Of the reference's peak: what float32 leaves when the same sums are taken in another order (DESIGN 10)."""
DEFAULT = (4, 8, 16, 25)
GAIN = 0.7
"""Of the random decoder's weights: inside it amplitudes then stay near 1, where SnakeBeta does not magnify rounding."""
Codes = NDArray[np.int64]
Sound = NDArray[np.float32]


def context(model: Path | None, load_format: str = "auto", **options: Any) -> EngineContext:
    stage = StagePipelineConfig(
        name="code2wav",
        execution_type=StageExecutionType.LLM_GENERATION,
        model_arch="Qwen3OmniCode2Wav",
        inputs=(Edge(source="request", processor="x:y", parts=("speech_text",)),),
    )
    return EngineContext(
        stage=stage,
        model=None if model is None else str(model),
        model_cls=Qwen3OmniCode2Wav,
        options=Code2WavOptions(**options),
        load_format=load_format,  # type: ignore[arg-type]
        progress=lambda line: None,
    )


def loaded(model: Path, **options: Any) -> Qwen3OmniCode2Wav:
    codec = Qwen3OmniCode2Wav(context(model, **options))
    codec.load()
    return codec


@pytest.fixture(scope="session")
def reference(upstream: Any) -> Qwen3OmniMoeCode2Wav:
    """Loaded by transformers itself."""
    model: Qwen3OmniMoeCode2Wav = upstream.code2wav
    return model


def random_codes(model: Qwen3OmniMoeCode2Wav, frames: int, seed: int = 0) -> Codes:
    size = (frames, model.config.num_quantizers)
    return np.random.default_rng(seed).integers(0, model.config.codebook_size, size)


@torch.inference_mode()
def one_call(model: Qwen3OmniMoeCode2Wav, codes: Codes) -> Sound:
    sound: Sound = model(torch.from_numpy(codes.T[None].copy()))[0, 0].numpy()
    assert rms(sound) > 0.01, "the reference is silent"
    assert np.abs(sound).max() < 1, "the reference is clamped"
    return sound


def rms(sound: Sound) -> float:
    return float(np.sqrt(np.mean(sound.astype(np.float64) ** 2)))


def check_equal(sound: Sound, reference: Sound) -> None:
    assert sound.shape == reference.shape
    assert sound.dtype == np.float32
    assert np.abs(sound - reference).max() <= TOLERANCE * np.abs(reference).max()


def cut(codes: Codes, sizes: Sequence[int]) -> list[Codes]:
    """Pieces of the given sizes, the last one repeating."""
    pieces, start, made = [], 0, 0
    while start < len(codes):
        size = sizes[min(made, len(sizes) - 1)]
        pieces.append(codes[start : start + size])
        start, made = start + size, made + 1
    return pieces


def stream(decoder: StreamingCode2Wav | TruncatedCode2Wav, codes: Codes, sizes: Sequence[int]) -> Sound:
    """One request, alone."""
    past: Any = None
    sound = []
    for piece in cut(codes, sizes):
        ((samples, past),) = decoder.step([past], [piece])
        sound.append(samples)
    return np.concatenate(sound)


def decode(codec: Qwen3OmniCode2Wav, queues: Sequence[list[Codes]], seed: int) -> list[Sound]:
    """Decode all requests' pieces in steps that each take a random part of the requests that have pieces left."""
    rng = np.random.default_rng(seed)
    states = [codec.open(Request(f"r{i}", seed=0)) for i in range(len(queues))]
    waiting, position = [list(queue) for queue in queues], [0] * len(queues)
    sound: list[list[Sound]] = [[] for _ in queues]
    while left := [i for i, queue in enumerate(waiting) if queue]:
        chosen = [i for i in left if rng.random() < 0.6] or left
        items = []
        for i in chosen:
            piece = waiting[i].pop(0)
            items.append(DecodeItem(states[i], CodeFrameChunk(position[i], piece), last=not waiting[i]))
            position[i] += len(piece)
        for i, samples in zip(chosen, codec.decode(items), strict=True):
            sound[i].append(samples)
    for state in states:
        codec.close(state)
    return [np.concatenate(parts) for parts in sound]


@pytest.mark.parametrize(
    ("rates", "tail"), [((8, 5, 4, 3), 555), ((3,), 3), ((2, 2), 6), ((), 0), ((5, 4, 3), 75), ((3, 4, 5, 8), 688)]
)
def test_c19_tail_formula(rates: tuple[int, ...], tail: int):
    assert tail_samples(rates) == tail


@pytest.mark.parametrize("rates", [(8, 5, 4, 3), (3,), (2, 7)])
def test_c19_tail_is_what_upstream_lacks(rates: tuple[int, ...]):
    config = Qwen3OmniMoeCode2WavConfig(
        codebook_size=8, hidden_size=8, num_attention_heads=2, num_key_value_heads=2, sliding_window=3,
        intermediate_size=8, num_hidden_layers=1, num_quantizers=2, decoder_dim=32, upsample_rates=rates,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    model = Qwen3OmniMoeCode2Wav._from_config(config).eval()
    codes = random_codes(model, 5)
    with torch.inference_mode():
        whole = model(torch.from_numpy(codes.T[None].copy()))[0, 0].numpy()
    assert 5 * int(model.total_upsample) - len(whole) == tail_samples(rates)
    decoder = StreamingCode2Wav(model)
    assert (decoder.samples_per_frame, decoder.tail) == (int(model.total_upsample), tail_samples(rates))
    assert stream(decoder, codes, (2,)).shape == whole.shape


@pytest.mark.parametrize("sizes", [(1,), DEFAULT, (3, 1, 30), (400,)])
def test_the_stream_equals_one_call(tiny_checkpoint: Path, reference: Qwen3OmniMoeCode2Wav, sizes: tuple[int, ...]):
    codec = loaded(tiny_checkpoint)
    codes = random_codes(reference, 330 if len(sizes) == 4 else 90)
    (sound,) = decode(codec, [cut(codes, sizes)], seed=0)
    check_equal(sound, one_call(reference, codes))


@pytest.mark.parametrize("options", [{}, {"batch_rows": 3}, {"deterministic": True}])
def test_batches_of_any_mix_equal_one_call(tiny_checkpoint: Path, reference: Qwen3OmniMoeCode2Wav, options: Any):
    """Requests of different lengths, ages and chunk sizes in one step; padding never reaches a sample."""
    codec = loaded(tiny_checkpoint, **options)
    lengths = (1, 2, 9, 25, 37, 60, 41, 80)
    schedules = ((4, 25), (1,), DEFAULT, (7, 2))
    codes = [random_codes(reference, n, seed=n) for n in lengths]
    queues = [cut(c, schedules[i % len(schedules)]) for i, c in enumerate(codes)]
    for seed in range(3):
        for sound, c in zip(decode(codec, queues, seed), codes, strict=True):
            check_equal(sound, one_call(reference, c))


@pytest.mark.parametrize("mode", ["stateful", "truncated"])
def test_deterministic_gives_equal_bytes_alone_and_in_a_crowd(
    tiny_checkpoint: Path, reference: Qwen3OmniMoeCode2Wav, mode: str
):
    codec = loaded(tiny_checkpoint, deterministic=True, context=mode)
    queues = [cut(random_codes(reference, 40, seed=i), DEFAULT) for i in range(17)]
    (alone,) = decode(codec, queues[:1], seed=1)
    for seed in range(3):
        assert decode(codec, queues, seed)[0].tobytes() == alone.tobytes()


async def frames_of(codes: Codes, size: int) -> AsyncIterator[CodeFrameChunk]:
    for start in range(0, len(codes), size):
        yield CodeFrameChunk(start, codes[start : start + size])
        await asyncio.sleep(0)


async def spoken(engine: CodecEngine, codes: Codes, name: str, size: int = 1, **fields: Any) -> tuple[Sound, Finish]:
    chunks, finish = [], None
    async for output in engine.generate(Request(name, seed=0, **fields), {"up": frames_of(codes, size)}):
        if isinstance(output, AudioChunk):
            assert output.position == sum(map(len, chunks))
            chunks.append(output.samples)
        elif isinstance(output, Finish):
            finish = output
    assert finish is not None
    return np.concatenate([np.zeros(0, np.float32), *chunks]), finish


async def test_c21_through_the_engine_every_length_arrives_whole(
    tiny_checkpoint: Path, reference: Qwen3OmniMoeCode2Wav
):
    engine = CodecEngine(context(tiny_checkpoint))
    await engine.start()
    lengths = (0, 1, 3, 4, 5, 12, 28, 29, 53, 320)
    codes = [random_codes(reference, n, seed=n) for n in lengths]
    done = await asyncio.gather(*(spoken(engine, c, f"r{i}", 1 + i % 3) for i, c in enumerate(codes)))
    for (sound, finish), c in zip(done, codes, strict=True):
        assert (finish.reason, finish.usage.audio_tokens) == ("stop", len(c))
        if len(c):
            check_equal(sound, one_call(reference, c))
        else:
            assert not len(sound)
    assert engine.stats().running == 0
    await engine.stop()


async def test_a_request_with_an_impossible_code_fails_alone(tiny_checkpoint: Path, reference: Qwen3OmniMoeCode2Wav):
    engine = CodecEngine(context(tiny_checkpoint, chunk_frames=(10,)))
    await engine.start()
    good = random_codes(reference, 40)
    bad = good.copy()
    bad[25, 1] = reference.config.codebook_size
    ok, failed, narrow = await asyncio.gather(
        spoken(engine, good, "good"),
        spoken(engine, bad, "bad"),
        spoken(engine, good[:, 1:], "narrow"),
        return_exceptions=True,
    )
    assert isinstance(failed, StageFailedError)
    assert f"code {reference.config.codebook_size} is not in a codebook" in str(failed)
    assert isinstance(narrow, StageFailedError)
    assert isinstance(ok, tuple)
    check_equal(ok[0], one_call(reference, good))
    await engine.stop()


def test_a_failed_step_changes_no_state(tiny_checkpoint: Path, reference: Qwen3OmniMoeCode2Wav):
    codec = loaded(tiny_checkpoint)
    codes = random_codes(reference, 30)
    state, other = (codec.open(Request(f"r{i}", seed=0)) for i in range(2))
    (first,) = codec.decode([DecodeItem(state, CodeFrameChunk(0, codes[:10]), last=False)])
    wrong = CodeFrameChunk(0, np.full((10, codes.shape[1]), -1))
    rest = DecodeItem(state, CodeFrameChunk(10, codes[10:]), last=True)
    with pytest.raises(StageFailedError, match="code -1"):
        codec.decode([rest, DecodeItem(other, wrong, last=True)])
    (second,) = codec.decode([rest])
    check_equal(np.concatenate([first, second]), one_call(reference, codes))


# --- the published shape ---


def published(decoder_dim: int) -> Qwen3OmniMoeCode2Wav:
    """Published shape, random weights at which all of it is heard and none of it saturates.

    As initialised, layer scales are 0.01 and ConvNeXt's gamma 1e-6: the transformer would hardly matter. A narrower
    decoder keeps the gain of the published one.
    """
    raw = json.loads(PUBLISHED.read_text())["code2wav_config"]
    config = Qwen3OmniMoeCode2WavConfig(**{**raw, "decoder_dim": decoder_dim})
    assert (config.sliding_window, config.num_hidden_layers, config.hidden_size) == (72, 8, 1024)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen3OmniMoeCode2Wav._from_config(config).eval()
        for name, weight in model.named_parameters():
            if name.endswith(("gamma", ".scale")):
                weight.fill_(0.5)
        for _, weight in model.decoder[1:].named_parameters():
            if weight.dim() == 3:
                weight.mul_(GAIN * (raw["decoder_dim"] / decoder_dim) ** 0.5)
    return model


def test_the_published_attention_over_640_frames():
    """Window 72 x 8 layers, hidden 1024. The convolutions are narrow (96 instead of 1536), or this took minutes."""
    model = published(decoder_dim=96)
    codes = random_codes(model, 640)
    whole = one_call(model, codes)
    beginning = stream(TruncatedCode2Wav(model, 25), codes[:110], (4, 25))
    assert rms(beginning - whole[: len(beginning)]) > 0.1 * rms(whole), "25 frames of context do: why carry state?"
    check_equal(stream(StreamingCode2Wav(model), codes, DEFAULT), whole)


def test_the_published_convolutions():
    """Everything at its published width."""
    model = published(decoder_dim=1536)
    codes = random_codes(model, 40)
    whole = one_call(model, codes)
    check_equal(stream(StreamingCode2Wav(model), codes, DEFAULT), whole)


# --- context: truncated ---


def test_golden_windows_of_upstream(reference: Qwen3OmniMoeCode2Wav):
    decoder = TruncatedCode2Wav(reference, Code2WavOptions(context="truncated").truncated_left())
    seen, past = [], None
    for piece in cut(random_codes(reference, 32), (4, 25)):
        ((window, context),) = decoder.windows([past], [piece])
        seen.append((len(window), context))
        ((_, past),) = decoder.step([past], [piece])
    assert seen == [(4, 0), (29, 4), (28, 25)]


def test_truncated_equals_one_call_where_the_context_covers_the_window(
    tiny_checkpoint: Path, reference: Qwen3OmniMoeCode2Wav
):
    """Tiny: 2 layers of window 8 look back 14 frames, the convolutions 10 more."""
    codec = loaded(tiny_checkpoint, context="truncated")
    codes = [random_codes(reference, n, seed=n) for n in (3, 32, 64, 100)]
    for sound, c in zip(decode(codec, [cut(c, (4, 25)) for c in codes], seed=0), codes, strict=True):
        check_equal(sound, one_call(reference, c))


def test_c20_options_that_mean_nothing_or_click_are_refused():
    for wrong, words in (
        ({"left_context": 30}, "no meaning"),
        ({"context": "truncated", "left_context": 24}, "below upstream's 25"),
        ({"context": "exact"}, "'stateful' or 'truncated'"),
    ):
        with pytest.raises(ValidationError, match=words):
            Code2WavOptions(**wrong)  # type: ignore[arg-type]
    assert Code2WavOptions(context="truncated", left_context=72).truncated_left() == 72


# --- loading ---


def test_dummy_weights_need_only_a_config(tiny_checkpoint: Path, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((tiny_checkpoint / "config.json").read_bytes())
    codec = loaded(tmp_path, load_format="dummy")
    state = codec.open(Request("r", seed=0))
    codebooks = json.loads((tmp_path / "config.json").read_text())["code2wav_config"]["num_quantizers"]
    item = DecodeItem(state, CodeFrameChunk(0, np.zeros((4, codebooks), np.int64)), last=True)
    (sound,) = codec.decode([item])
    assert len(sound) == 4 * 1920 - 555
    assert np.isfinite(sound).all()
    with pytest.raises(ConfigError, match="safetensors"):
        loaded(tmp_path)


def test_what_has_no_code2wav_is_refused(tiny_checkpoint: Path, tmp_path: Path):
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "enable_audio_output": False}))
    with pytest.raises(ConfigError, match="enable_audio_output"):
        loaded(tmp_path)
    with pytest.raises(ConfigError, match="needs a model"):
        Qwen3OmniCode2Wav(context(None)).load()
