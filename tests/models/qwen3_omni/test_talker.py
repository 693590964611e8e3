"""The talker against transformers' monolithic model on the tiny checkpoint: equal codes, however its text arrives."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_ray.config.pipeline import Edge, StageExecutionType, StagePipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.ar import AREngine
from omni_ray.engine.base import EngineContext
from omni_ray.engine.resume import Resume
from omni_ray.engine.types import CodeFrameChunk, Finish, Request
from omni_ray.errors import ConfigError, InvalidRequestError, StageFailedError
from omni_ray.models.qwen3_omni.checkpoint import make_tiny
from omni_ray.models.qwen3_omni.options import TalkerOptions
from omni_ray.models.qwen3_omni.positions import Grid
from omni_ray.models.qwen3_omni.talker import Qwen3OmniTalker
from omni_ray.models.qwen3_omni.talker_input import TalkerPrompt, TalkerText

GREEDY = SamplingParams(temperature=0, repetition_penalty=1.05)
SAMPLED = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05)
SPEAKER = "ethan"
TEXT_TOKENS = 14
FRAMES = 27


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_omni") / "tiny"
    make_tiny(path)
    return path


@dataclass
class Reference:
    """What upstream's ``generate`` gave for a prompt: the talker's input and its codes int64 [frames, codebooks]."""

    prompt: TalkerPrompt
    answer: tuple[int, ...]
    codes: NDArray[np.int64]


class Monolith:
    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.codes: Tensor | None = None
        decode = self.model.code2wav.chunked_decode

        def record(codes: Tensor, **kwargs: Any) -> Tensor:
            self.codes = codes
            return decode(codes, **kwargs)

        self.model.code2wav.chunked_decode = record

    def ids(self, messages: Sequence[dict[str, Any]], places: int = 1) -> Tensor:
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        for place in ("<|audio_pad|>", "<|image_pad|>"):
            text = text.replace(place, place * places)
        return torch.tensor([self.tokenizer(text, add_special_tokens=False)["input_ids"]])

    @torch.inference_mode()
    def run(self, ids: Tensor, grids: tuple[Grid, ...] = (), frames: int = FRAMES, **media: Tensor) -> Reference:
        torch.set_num_threads(2)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **media}
        sequences, _ = self.model.generate(
            **inputs,
            speaker=SPEAKER,
            return_audio=True,
            thinker_max_new_tokens=TEXT_TOKENS,
            thinker_eos_token_id=self.model.config.im_end_token_id,
            thinker_do_sample=False,
            talker_do_sample=False,
            talker_max_new_tokens=frames + 1,  # the last one of upstream's is no frame
        )
        assert self.codes is not None
        prompt = TalkerPrompt(tuple(ids[0].tolist()), SPEAKER, self._media_rows(ids, inputs) if media else None, grids)
        return Reference(prompt, tuple(sequences[0, ids.shape[1] : -1].tolist()), self.codes[0].T.numpy())

    def _media_rows(self, ids: Tensor, inputs: dict[str, Tensor]) -> NDArray[np.float32]:
        config = self.model.config.talker_config
        states = self.model.thinker(**inputs, output_hidden_states=True).hidden_states[config.accept_hidden_layer]
        places = torch.tensor([config.audio_token_id, config.image_token_id, config.video_token_id])
        rows: NDArray[np.float32] = states[torch.isin(ids, places)].numpy()
        return rows


@pytest.fixture(scope="session")
def monolith(tiny: Path) -> Monolith:
    return Monolith(tiny)


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def about(kind: str) -> list[dict[str, Any]]:
    return [message("user", [{"type": kind}, {"type": "text", "text": f"Please describe this {kind}."}])]


def reference(monolith: Monolith, name: str) -> Reference:
    noise = torch.Generator().manual_seed(3)
    if name == "text":
        asked = [message("system", "You are a helpful assistant."), message("user", "Hello, how are you today?")]
        return monolith.run(monolith.ids(asked))
    if name == "multi-turn":
        asked = [message("user", "Hello"), message("assistant", "Hello world"), message("user", "one two three")]
        return monolith.run(monolith.ids(asked))
    if name == "audio":
        features = torch.randn(1, 128, 200, generator=noise)
        mask = torch.ones(1, 200, dtype=torch.long)
        return monolith.run(monolith.ids(about("audio"), 26), input_features=features, feature_attention_mask=mask)
    assert name == "image"
    pixels = torch.randn(4 * 6, 3 * 2 * 16 * 16, generator=noise)
    ids, grid = monolith.ids(about("image"), 6), torch.tensor([[1, 4, 6]])
    return monolith.run(ids, (Grid(1, 4, 6),), pixel_values=pixels, image_grid_thw=grid)


@pytest.fixture(scope="session")
def references(monolith: Monolith) -> dict[str, Reference]:
    return {name: reference(monolith, name) for name in ("text", "audio", "image", "multi-turn")}


def context(model: Path, load_format: Literal["auto", "dummy"] = "auto", **options: Any) -> EngineContext:
    edge = Edge(source="request", processor="a:b", parts=("messages",))
    stage = StagePipelineConfig(
        name="talker", execution_type=StageExecutionType.LLM_AR, model_arch="Qwen3OmniTalker", inputs=(edge,)
    )
    merged = TalkerOptions(**{"max_num_seqs": 4, "max_model_len": 512, **options})
    return EngineContext(stage, str(model), Qwen3OmniTalker, merged, load_format, progress=lambda line: None)


@pytest.fixture
async def start(tiny: Path) -> AsyncIterator[Any]:
    engines: list[AREngine] = []

    async def make(model: Path = tiny, **options: Any) -> AREngine:
        engines.append(AREngine(context(model, **options)))
        await engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        await engine.stop()
        assert engine.stats().running == engine.stats().queued == 0


async def at_once(prompt: TalkerPrompt, answer: Sequence[int]) -> AsyncIterator[Any]:
    yield prompt
    if answer:
        yield TalkerText(tuple(answer))


async def speak(
    engine: AREngine,
    source: AsyncIterator[Any],
    sampling: SamplingParams = GREEDY,
    seed: int = 1,
    resume: Resume | None = None,
) -> tuple[NDArray[np.int64], Finish]:
    frames: list[NDArray[np.int64]] = []
    finish = None
    async with aclosing(engine.generate(Request("r", seed, sampling=sampling), {"thinker": source}, resume)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            assert finish is None
            if isinstance(output, CodeFrameChunk):
                assert output.position == len(frames)
                frames.extend(output.frames)
            else:
                assert isinstance(output, Finish)
                finish = output
    assert finish is not None
    assert finish.usage.audio_tokens == len(frames)
    return np.stack(frames) if frames else np.zeros((0, 4), np.int64), finish


def limited(sampling: SamplingParams, frames: int = FRAMES) -> SamplingParams:
    return SamplingParams(max_tokens=frames).over(sampling)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["text", "audio", "image", "multi-turn"])
async def test_codes_equal_upstream(
    start: Any, references: dict[str, Reference], name: str, deterministic: bool
) -> None:
    whole = references[name]
    assert whole.codes.shape == (FRAMES, 4)
    assert len(np.unique(whole.codes)) > 20
    engine = await start(deterministic=deterministic)
    codes, finish = await speak(engine, at_once(whole.prompt, whole.answer), limited(GREEDY))
    np.testing.assert_array_equal(codes, whole.codes)
    assert finish.reason == "length"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
async def test_goes_on_where_another_replica_died(
    start: Any, references: dict[str, Reference], deterministic: bool, sampled: bool
) -> None:
    """With the frames that were heard, taken in as a prompt would be or (deterministic) made again: the same codes."""
    whole, engine = references["text"], await start(deterministic=deterministic)
    how = limited(SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05) if sampled else GREEDY)
    codes, finish = await speak(engine, at_once(whole.prompt, whole.answer), how, seed=4)
    for known in (1, FRAMES // 2, FRAMES - 1):
        resume = Resume(frames=codes[:known])
        again, ended = await speak(engine, at_once(whole.prompt, whole.answer), how, seed=4, resume=resume)
        np.testing.assert_array_equal(again, codes)
        assert ended == finish


async def test_text_may_come_late_and_token_by_token(start: Any, references: dict[str, Reference]) -> None:
    """Frame k comes out when tokens 1 .. k+1 are there, not before, and never with padding instead."""
    whole = references["text"]
    engine = await start()
    events: list[str] = []
    go = asyncio.Event()

    async def late() -> AsyncIterator[Any]:
        yield whole.prompt
        for token in whole.answer:
            await asyncio.wait_for(go.wait(), 10)
            go.clear()
            await asyncio.sleep(0.01)
            events.append("token")
            yield TalkerText((token,))
        await asyncio.wait_for(go.wait(), 10)
        await asyncio.sleep(0.01)
        events.append("end")

    frames = []
    go.set()
    request = Request("r", 1, sampling=limited(GREEDY))
    async for output in engine.generate(request, {"thinker": late()}):
        if isinstance(output, CodeFrameChunk):
            events.extend(["frame"] * len(output.frames))
            frames.extend(output.frames)
            go.set()
    np.testing.assert_array_equal(np.stack(frames), whole.codes)
    fed = ["token", "frame"] * len(whole.answer)
    assert events == [*fed, "end", *["frame"] * (FRAMES - len(whole.answer))]


async def test_many_at_once_equal_upstream(start: Any, references: dict[str, Reference]) -> None:
    """Rows join, wait and leave at different times; every one gets its own upstream codes."""
    engine = await start()

    async def dripping(whole: Reference, pause: float) -> AsyncIterator[Any]:
        yield whole.prompt
        for token in whole.answer:
            await asyncio.sleep(pause)
            yield TalkerText((token,))

    asked = [(whole, 0.003 * i) for i, whole in enumerate([*references.values(), *references.values()])]
    got = await asyncio.gather(*(speak(engine, dripping(whole, pause), limited(GREEDY)) for whole, pause in asked))
    for (whole, _), (codes, _) in zip(asked, got, strict=True):
        np.testing.assert_array_equal(codes, whole.codes)


async def test_text_ends_early(start: Any, monolith: Monolith, references: dict[str, Reference]) -> None:
    """tts_eos once, then tts_pad, as upstream when the thinker stops at its stop token."""
    answer = references["text"].answer
    place = next(i for i in range(4, len(answer)) if answer[i] not in answer[:i])
    kept = monolith.model.config.im_end_token_id
    monolith.model.config.im_end_token_id = answer[place]
    try:
        whole = reference(monolith, "text")
    finally:
        monolith.model.config.im_end_token_id = kept
    assert whole.answer == answer[:place]
    engine = await start()
    codes, _ = await speak(engine, at_once(whole.prompt, whole.answer), limited(GREEDY))
    np.testing.assert_array_equal(codes, whole.codes)


def with_stop_code(tiny: Path, other: Path, old: int, new: int) -> Path:
    """The tiny checkpoint with another codec stop code in its config."""
    other.mkdir()
    for path in tiny.iterdir():
        (other / path.name).symlink_to(path)
    (other / "config.json").unlink()
    config = (tiny / "config.json").read_text()
    (other / "config.json").write_text(config.replace(f'"codec_eos_token_id": {old}', f'"codec_eos_token_id": {new}'))
    return other


async def test_codec_eos_in_the_middle(
    start: Any, monolith: Monolith, references: dict[str, Reference], tiny: Path, tmp_path: Path
) -> None:
    first = references["text"].codes[:, 0].tolist()
    stop = next(code for i, code in enumerate(first) if i > 5 and code not in first[:i])
    eos = monolith.model.config.talker_config.codec_eos_token_id
    other = with_stop_code(tiny, tmp_path / "other", eos, stop)
    monolith.model.config.talker_config.codec_eos_token_id = stop
    try:
        whole = reference(monolith, "text")
    finally:
        monolith.model.config.talker_config.codec_eos_token_id = eos
    assert len(whole.codes) == first.index(stop)
    engine = await start(other)
    codes, finish = await speak(engine, at_once(whole.prompt, whole.answer))
    np.testing.assert_array_equal(codes, whole.codes)
    assert finish.reason == "stop"


async def test_an_answer_of_one_token_is_silence(start: Any, references: dict[str, Reference]) -> None:
    """cases.md C52; upstream crashes here."""
    engine = await start()
    codes, finish = await speak(engine, at_once(references["text"].prompt, ()))
    assert len(codes) == 0
    assert finish.reason == "stop"


async def test_a_talker_that_never_stops_is_cut_off(start: Any, references: dict[str, Reference]) -> None:
    """cases.md C23: by the text's length; by the longest speech that the request may have."""
    whole = references["text"]
    engine = await start(base_frames=20, frames_per_unit=3)
    codes, finish = await speak(engine, at_once(whole.prompt, whole.answer[:4]))
    assert (len(codes), finish.reason) == (20 + 3 * 4, "length")
    request = Request("r", 1, sampling=GREEDY, max_audio_seconds=1.0)
    outputs = [output async for output in engine.generate(request, {"t": at_once(whole.prompt, whole.answer)})]
    assert sum(len(output.frames) for output in outputs[:-1]) == 12  # type: ignore[union-attr]
    assert outputs[-1].reason == "length"  # type: ignore[union-attr]


async def test_random_weights_speak_to_the_limit(start: Any, references: dict[str, Reference]) -> None:
    """A benchmark's answers must be equally long on every server; by chance one in 97 frames would end an answer."""
    torch.manual_seed(0)
    whole = references["text"]
    engine = await start(load_format="dummy", base_frames=10**6)
    sampling = SamplingParams(temperature=2, max_tokens=400)
    codes, finish = await speak(engine, at_once(whole.prompt, whole.answer), sampling)
    assert (len(codes), finish.reason) == (400, "length")


async def test_speakers(start: Any, references: dict[str, Reference]) -> None:
    whole = references["text"]
    engine = await start()

    def named(speaker: str | None) -> AsyncIterator[Any]:
        return at_once(TalkerPrompt(whole.prompt.prompt_ids, speaker), whole.answer)

    loud, _ = await speak(engine, named("EtHaN"), limited(GREEDY))
    np.testing.assert_array_equal(loud, whole.codes)
    unnamed, _ = await speak(engine, named(None), limited(GREEDY))
    np.testing.assert_array_equal(unnamed, whole.codes)
    other, _ = await speak(engine, named("chelsie"), limited(GREEDY))
    assert not np.array_equal(other, whole.codes)
    with pytest.raises(InvalidRequestError, match="chelsie, ethan") as error:
        await speak(engine, named("alloy"))
    assert error.value.param == "voice"


async def test_media_rows_must_fit(start: Any, references: dict[str, Reference]) -> None:
    prompt = references["audio"].prompt
    engine = await start()
    with pytest.raises(StageFailedError, match="26 media positions, 0"):
        await speak(engine, at_once(TalkerPrompt(prompt.prompt_ids, SPEAKER), (5,)))
    assert prompt.media_rows is not None
    codes, _ = await speak(engine, at_once(prompt, references["audio"].answer), limited(GREEDY))
    np.testing.assert_array_equal(codes, references["audio"].codes)


async def test_sampled_codes_are_equal_alone_and_in_a_crowd(start: Any, references: dict[str, Reference]) -> None:
    """cases.md C38, deterministic mode: one request alone, and among 16 others whose text comes at other times."""
    engine = await start(deterministic=True, max_num_seqs=17, max_model_len=256)
    names = list(references)

    async def dripping(name: str, pause: float) -> AsyncIterator[Any]:
        yield references[name].prompt
        for token in references[name].answer:
            await asyncio.sleep(pause)
            yield TalkerText((token,))

    def ask(name: str, seed: int, pause: float) -> Any:
        return speak(engine, dripping(name, pause), limited(SAMPLED, 20), seed)

    alone, _ = await ask("text", 7, 0.0)
    again, _ = await ask("text", 7, 0.0)
    np.testing.assert_array_equal(alone, again)
    crowd = await asyncio.gather(
        *(ask(names[i % 4], 100 + i, 0.002 * i) for i in range(9)),
        ask("text", 7, 0.004),
        *(ask(names[i % 4], 200 + i, 0.003 * i) for i in range(7)),
    )
    np.testing.assert_array_equal(crowd[9][0], alone)
    assert not np.array_equal(crowd[0][0], alone)  # the same prompt with another seed


async def test_seed_and_sampling_reach_every_codebook(start: Any, references: dict[str, Reference]) -> None:
    engine = await start()
    whole = references["text"]
    one, two = [(await speak(engine, at_once(whole.prompt, whole.answer), limited(SAMPLED), s))[0] for s in (1, 2)]
    assert all((one[:, book] != two[:, book]).any() for book in range(4))
    narrow, _ = await speak(engine, at_once(whole.prompt, whole.answer), limited(SamplingParams(top_k=1), 1), 5)
    assert narrow[0, 0] == whole.codes[0, 0]


def test_an_8_bit_cache_is_small_and_changes_little(tiny: Path, references: dict[str, Reference]) -> None:
    whole, evidence, sizes = references["audio"], [], []
    for kv_cache_dtype in ("auto", "fp8"):
        talker = Qwen3OmniTalker(context(tiny, dtype="float32", kv_cache_dtype=kv_cache_dtype))
        with torch.inference_mode():
            talker.load()
            prompt = talker.encode(whole.prompt)
            talker.begin(1, prompt)
            talker.prefill(1, prompt, 0)
            talker.sample_as(1, Request("r", 1, sampling=GREEDY))
            talker.feed(1, TalkerText(whole.answer))
            evidence.append(talker.step([1], [0]).evidence)
        sizes.append(talker.kv_bytes())
    head = talker._talker.keys.numbers.shape[-1]
    assert sizes[1] * 4 * head == sizes[0] * (head + 4)
    assert 1e-5 < (evidence[1] - evidence[0]).norm() / evidence[0].norm() < 0.1


def test_every_parameter_is_upstream_s(tiny: Path, monolith: Monolith) -> None:
    talker = Qwen3OmniTalker(context(tiny))
    with torch.inference_mode():
        talker.load()
    ours, theirs = dict(talker._upstream.named_parameters()), dict(monolith.model.talker.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert set(talker.speakers) == {"ethan", "chelsie"}


def test_no_model_is_an_error(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        Qwen3OmniTalker(context(tiny / "nowhere")).load()
    with pytest.raises(ConfigError, match="max_model_len"):
        Qwen3OmniTalker(context(tiny, max_model_len=10**6)).load()
