"""Real hibari weights through talker and codec: same sound as hibari, whatever the chunks; speed, limits, silence."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_ray.config.pipeline import Edge, StageExecutionType, StagePipelineConfig
from omni_ray.engine import noise
from omni_ray.engine.base import EngineContext
from omni_ray.engine.codec import CodecEngine
from omni_ray.engine.options import CodecOptions, EngineOptions, PerRequestOptions
from omni_ray.engine.per_request import PerRequestEngine
from omni_ray.engine.types import AudioChunk, Finish, LatentChunk, Output, Request
from omni_ray.errors import InvalidRequestError, StageFailedError
from omni_ray.models.voice_chat import code2wav, talker
from omni_ray.models.voice_chat.clauses import Clause
from omni_ray.models.voice_chat.code2wav import BINS, HOP, ROW_WIDTH, HibariCodec, Segment, advance
from omni_ray.models.voice_chat.talker import LATENT_ROWS, HibariTalker

dsp = pytest.importorskip("hibari.dsp")
pytestmark = [pytest.mark.weights, pytest.mark.asyncio(loop_scope="module")]

SENTENCE = "The capital of France is Paris."


def context(name: str, model_cls: type[Any], options: EngineOptions) -> EngineContext:
    stage = StagePipelineConfig(
        name=name,
        execution_type=StageExecutionType.LLM_GENERATION,
        model_arch=model_cls.__name__,
        inputs=(Edge(source="request", processor="x:y", parts=("speech_text",)),),
    )
    return EngineContext(stage=stage, model=None, model_cls=model_cls, options=options)


@pytest.fixture(scope="module")
def hibari_talker() -> HibariTalker:
    model = HibariTalker(context("talker", HibariTalker, PerRequestOptions()))
    model.load()
    return model


class Loaded(HibariTalker):
    """The talker with the weights of another one, so that they load once per test run."""

    def load(self) -> None:
        pass


@pytest.fixture(scope="module")
def speak(hibari_talker: HibariTalker) -> Any:
    def make(made: EngineContext) -> HibariTalker:
        model = Loaded(made)
        model.__dict__.update({k: v for k, v in vars(hibari_talker).items() if k != "context"})
        return model

    async def run(*texts: str, **fields: Any) -> list[Output]:
        made = context("talker", HibariTalker, PerRequestOptions())
        engine = PerRequestEngine(EngineContext(made.stage, None, make, made.options))  # type: ignore[arg-type]
        clauses = stream(Clause(i, text) for i, text in enumerate(texts))
        outputs = [o async for o in engine.generate(Request("r", seed=5, **fields), {"thinker": clauses})]
        await engine.stop()
        return outputs

    return run


async def stream(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


async def decode(chunks: Iterable[LatentChunk], sizes: tuple[int, ...], **fields: Any) -> list[Output]:
    engine = CodecEngine(context("code2wav", HibariCodec, CodecOptions(chunk_frames=sizes)))
    await engine.start()
    request = Request("r", **{"seed": 5, **fields})
    outputs = [o async for o in engine.generate(request, {"talker": stream(chunks)})]
    await engine.stop()
    return outputs


def latents(outputs: Iterable[Output]) -> list[LatentChunk]:
    return [o for o in outputs if isinstance(o, LatentChunk)]


def sound(outputs: Iterable[Output]) -> NDArray[np.float32]:
    chunks = [o for o in outputs if isinstance(o, AudioChunk)]
    end = 0
    for chunk in chunks:
        assert chunk.position == end
        assert len(chunk.samples)
        end += len(chunk.samples)
    return np.concatenate([np.zeros(0, np.float32), *(chunk.samples for chunk in chunks)])


class FixedNoise:
    """Stands in for hibari's generator and gives our noise, in hibari's layout."""

    def __init__(self, seed: int, position: int, rows: int) -> None:
        self.z = noise.complex_normal(seed, position + np.arange(rows)[:, None], 0, np.arange(BINS))

    def standard_normal(self, shape: tuple[int, int], dtype: Any) -> NDArray[np.float32]:
        drawn = np.ascontiguousarray(self.z.T).view(np.float32)
        assert drawn.shape == shape
        return drawn


def oracle(rows: NDArray[np.float32], seed: int, position: int) -> NDArray[np.float32]:
    spectra = [np.ascontiguousarray(rows[:, i * BINS : (i + 1) * BINS].T) for i in range(5)]
    waveform: NDArray[np.float32] = dsp.synth(
        *spectra, np.ascontiguousarray(rows[:, -1]), FixedNoise(seed, position, len(rows))
    )
    return waveform


@pytest.fixture(scope="module")
def rows(hibari_talker: HibariTalker) -> NDArray[np.float32]:
    (phonemes,) = hibari_talker._phonemes(SENTENCE)
    return hibari_talker._network(hibari_talker._hibari.ids(phonemes), 1.0)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 30, 186])
async def test_one_call_is_what_hibari_synthesises(rows: NDArray[np.float32], count: int) -> None:
    start = 0 if count > 30 else 50
    piece = rows[start : start + count]
    ours, _ = advance(Segment(), piece, 1000, 9, ends=True)
    theirs = oracle(piece, 9, 1000)
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape == (count * HOP,)
    assert np.abs(ours - theirs).max() <= 2e-6 * np.abs(theirs).max()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 60])
async def test_any_split_gives_the_same_bits(rows: NDArray[np.float32], count: int) -> None:
    piece = rows[50 : 50 + count]
    whole, _ = advance(Segment(), piece, 7, 3, ends=True)
    random = np.random.default_rng(count)
    for longest in (1, 2, 3, 5, 17):
        segment, parts, at = Segment(), [], 0
        while at < count:
            size = min(int(random.integers(0, longest + 1)), count - at)
            samples, segment = advance(segment, piece[at : at + size], 7 + at, 3, ends=False)
            parts.append(samples)
            at += size
        held = count * HOP - sum(len(part) for part in parts)
        assert held == min(count, code2wav.LOOKAHEAD_ROWS) * HOP  # no later than it must be
        parts.append(advance(segment, piece[:0], 7 + at, 3, ends=True)[0])
        assert np.array_equal(np.concatenate(parts), whole)


async def test_the_talker_emits_contiguous_pieces_of_segments(speak: Any) -> None:
    outputs = await speak("Hello there. How are you today?", "I am fine,", max_audio_seconds=60.0)
    chunks = latents(outputs)
    position = 0
    for chunk in chunks:
        assert chunk.position == position
        assert chunk.rows.shape[1] == ROW_WIDTH
        assert chunk.rows.dtype == np.float32
        assert chunk.rows.flags.c_contiguous
        assert 0 < len(chunk.rows) <= LATENT_ROWS
        position += len(chunk.rows)
    assert [c.segment for c in chunks if c.ends_segment] == [0, 1, 2]
    assert [c.segment for c in chunks] == sorted(c.segment for c in chunks)
    finish = outputs[-1]
    assert isinstance(finish, Finish)
    assert (finish.usage.completion_tokens, finish.usage.audio_tokens) == (2, position)


async def test_streamed_sound_equals_one_call_per_segment(speak: Any) -> None:
    chunks = latents(await speak("Hello there. It is me,", "and that is all"))
    expected, at = [], 0
    for number in range(3):
        segment = np.concatenate([c.rows for c in chunks if c.segment == number])
        expected.append(oracle(segment, 5, at))
        at += len(segment)
    outputs = await decode(chunks, (80,))
    whole = sound(outputs)
    reference = np.concatenate(expected)
    assert len(whole) == len(reference) == at * HOP
    assert np.abs(whole - reference).max() <= 2e-6 * np.abs(reference).max()
    finish = outputs[-1]
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.usage.audio_tokens) == ("stop", at)
    for sizes in [(16, 32, 64, 80), (7,), (4, 8, 16, 25), (1000,)]:
        assert np.array_equal(sound(await decode(chunks, sizes)), whole)
    assert not np.array_equal(sound(await decode(chunks, (80,), seed=6)), whole)


async def test_requests_decoded_together_sound_as_alone(speak: Any) -> None:
    texts = [SENTENCE, "Yes.", "It is late, good night."]
    spoken = [latents(await speak(text)) for text in texts]
    alone = [sound(await decode(chunks, (16, 32))) for chunks in spoken]
    engine = CodecEngine(context("code2wav", HibariCodec, CodecOptions(chunk_frames=(16, 32))))
    await engine.start()

    async def one(index: int) -> NDArray[np.float32]:
        inputs = {"talker": stream(spoken[index])}
        return sound([o async for o in engine.generate(Request(str(index), seed=5), inputs)])

    together = await asyncio.gather(*(one(i) for i in range(3)))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))
    assert engine.stats().running == 0
    await engine.stop()


async def test_max_audio_seconds_cuts_exactly_and_says_so(speak: Any) -> None:
    free = sound(await decode(latents(await speak(SENTENCE)), (16, 32)))
    outputs = await speak(SENTENCE, "And one more sentence.", max_audio_seconds=0.77)
    assert outputs[-1].reason == "length"
    cut = await decode(latents(outputs), (16, 32), max_audio_seconds=0.77)
    assert cut[-1].reason == "length"  # type: ignore[union-attr]
    assert np.array_equal(sound(cut), free[: int(0.77 * 24000)])


@pytest.mark.parametrize("texts", [(), ("",), ("!!!", "😀"), ("https://a.b/c\n",)])
async def test_nothing_to_say_finishes_without_chunks(speak: Any, texts: tuple[str, ...]) -> None:
    outputs = await speak(*texts)
    assert [type(o) for o in outputs] == [Finish]
    assert outputs[0].reason == "stop"
    assert [type(o) for o in await decode([], (16,))] == [Finish]


@pytest.mark.parametrize("text", [SENTENCE, "The quick brown fox jumps over the lazy dog and then runs far away."])
async def test_speed_scales_the_duration(speak: Any, text: str) -> None:
    async def seconds(speed: float) -> float:
        return float(sum(len(c.rows) for c in latents(await speak(text, speed=speed))))

    normal = await seconds(1.0)
    for speed in (0.25, 0.5, 0.8, 1.2, 1.3, 2.0, 4.0):
        assert abs(await seconds(speed) * speed / normal - 1) <= 0.05, speed


async def test_markdown_is_not_spoken_and_silence_is_short(speak: Any) -> None:
    plain, marked = await speak("This is very good."), await speak("This is **very** [good](http://x.y).")
    assert np.array_equal(
        np.concatenate([c.rows for c in latents(plain)]), np.concatenate([c.rows for c in latents(marked)])
    )
    samples = np.abs(sound(await decode(latents(plain), (80,))))
    first = np.flatnonzero(samples > 1e-3 * samples.max())[0]
    assert first < 0.12 * 24000
    word, comma, sentence = [
        sum(len(c.rows) for c in latents(await speak("on the table" + end))) for end in ("", ",", "\n")
    ]
    assert word < comma < sentence


async def test_long_text_without_punctuation_is_spoken_in_bounded_segments(hibari_talker: HibariTalker) -> None:
    strings = hibari_talker._phonemes("word and then " * 60)
    assert len(strings) > 1
    assert all(len(string) <= talker.MAX_PHONEMES for string in strings)
    assert [len(part) for part in talker._short("x" * 900)] == [400, 400, 100]


async def test_wrong_inputs_are_refused(speak: Any) -> None:
    with pytest.raises(InvalidRequestError, match="heart"):
        await speak("Hello.", voice="emma")
    with pytest.raises(StageFailedError, match=str(ROW_WIDTH)):
        await decode([LatentChunk(0, np.zeros((3, 7), np.float32))], (2,))
