"""The autoregressive engine with a toy model whose next token is a pure function of what its slot holds."""

import asyncio
import string
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from omni_ray.config.pipeline import Edge, StageExecutionType, StagePipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine import admission
from omni_ray.engine.ar import AREngine, ARModel
from omni_ray.engine.ar_model import PREFILL_CHUNK
from omni_ray.engine.base import EngineContext
from omni_ray.engine.batches import BatchLengthError
from omni_ray.engine.detokenizer import Detokenizer
from omni_ray.engine.noise import gumbel
from omni_ray.engine.options import AROptions
from omni_ray.engine.resume import Resume
from omni_ray.engine.sampler import NOT_A_NUMBER, Sampler, draw
from omni_ray.engine.types import Finish, Output, Request, TextChunk
from omni_ray.errors import EngineDiedError, InvalidRequestError, OmniRayError, SaturatedError, StageFailedError
from tests.clock import Clock, a_moment, put_clock

ALPHABET = "!" + string.ascii_letters + string.digits + " .,?"  # id 0 is an ordinary token (cases.md C24)
STOP = len(ALPHABET)
STOP_2 = STOP + 1
EURO = STOP + 2  # three tokens, a byte of the character each
VOCABULARY = STOP + 5
LENGTH = 400

GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Ask:
    """A toy prompt: ``prompt`` ids, and the ids that the model answers with before it says STOP."""

    answer: Sequence[int]
    prompt: Sequence[int] = (1, 2, 3)
    broken: str = ""


def ids(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


class Coded(list[int]):
    """A prepared toy prompt."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask.prompt)
        self.ask = ask


class Toy(ARModel):
    """Answers with a text hidden in the slot; checks that slots are used as promised."""

    latest: ClassVar["Toy"]

    def load(self) -> None:
        Toy.latest = self
        self.stop_ids = frozenset({STOP, STOP_2})
        self.slots: dict[int, Ask] = {}
        self.kv: dict[int, list[int]] = {}
        self.batches: list[tuple[int, ...]] = []
        self.pieces: list[int] = []
        self.gate = threading.Semaphore(10**9)  # steps that may run
        self.encoded = threading.Event()  # what slow prompts wait for
        self.encodings = 0

    def encode(self, prompt: Any) -> Coded:
        assert isinstance(prompt, Ask)
        if prompt.broken == "encode":
            raise ValueError("broken prompt")
        if prompt.broken == "slow":
            assert self.encoded.wait(30)
        self.encodings += 1
        return Coded(prompt)

    def detokenize(self, token_id: int) -> bytes:
        if token_id >= EURO:
            return "€".encode()[token_id - EURO : token_id - EURO + 1]
        return ALPHABET[token_id].encode() if token_id < STOP else b""

    def begin(self, slot: int, prompt: Any) -> int:
        assert slot not in self.slots
        self.slots[slot] = prompt.ask
        self.kv[slot] = []
        return 0

    def prefill(self, slot: int, ids: Sequence[int], start: int) -> Tensor:
        assert start == len(self.kv[slot])
        assert self.gate.acquire(timeout=60)
        self.pieces.append(slot)
        self.kv[slot].extend(ids)
        return self._logits(slot)

    def step(self, slots: Sequence[int], last_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        assert list(slots) == sorted(set(slots))
        assert self.gate.acquire(timeout=60)
        self.batches.append(tuple(slots))
        for slot, token, position in zip(slots, last_ids, positions, strict=True):
            if self.slots[slot].broken == "step" and position == len(self.slots[slot].prompt) + 2:
                raise RuntimeError(f"slot {slot} is broken")
            self.kv[slot][position:] = [token]
        return torch.stack([self._logits(slot) for slot in slots])

    def _logits(self, slot: int) -> Tensor:
        ask = self.slots[slot]
        done = len(self.kv[slot]) - len(ask.prompt)
        logits = torch.linspace(0, 1, VOCABULARY)
        if ask.broken == "flat":
            logits[STOP:] = -torch.inf
        else:
            logits[ask.answer[done] if 0 <= done < len(ask.answer) else STOP] = 50
        if ask.broken == "nan" and done == 2:
            logits[7] = torch.nan
        return logits

    def release(self, slot: int) -> None:
        self.slots.pop(slot, None)


@pytest.fixture
async def start() -> AsyncIterator[Any]:
    torch.set_num_threads(2)
    engines: list[AREngine] = []

    async def make(model: type[ARModel] = Toy, **options: Any) -> AREngine:
        edge = Edge(source="request", processor="a:b", parts=("messages",))
        stage = StagePipelineConfig(
            name="thinker", execution_type=StageExecutionType.LLM_AR, model_arch="Toy", inputs=(edge,)
        )
        merged = AROptions(**{"max_num_seqs": 8, "max_model_len": LENGTH, **options})
        engines.append(AREngine(EngineContext(stage, None, model, merged)))
        await engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        await engine.stop()
        assert engine.stats().running == engine.stats().queued == 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return put_clock(monkeypatch, admission)


async def one(prompt: Any) -> AsyncIterator[Any]:
    yield prompt


def run(
    engine: AREngine, ask: Ask, sampling: SamplingParams = GREEDY, seed: int = 1, resume: Resume | None = None
) -> Any:
    request = Request(request_id="r", seed=seed, sampling=sampling)
    return engine.generate(request, {"request": one(ask)}, resume)


async def collect(outputs: AsyncIterator[Output]) -> tuple[str, list[int], Finish]:
    """The whole answer; checks order, positions and the single Finish on the way."""
    text, tokens = "", list[int]()
    finish = None
    async for output in outputs:
        assert finish is None
        if isinstance(output, Finish):
            finish = output
            continue
        assert isinstance(output, TextChunk)
        assert output.text
        assert output.position == len(tokens)
        text += output.text
        tokens += output.token_ids
    assert finish is not None
    return text, tokens, finish


async def settled(condition: Any) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("not true within 20 s")


async def in_the_loop(prompts: int) -> None:
    """Wait until so many prompts in all are encoded and submitted."""
    await settled(lambda: Toy.latest.encodings == prompts)
    await a_moment()


async def test_answer_with_usage(start: Any) -> None:
    engine = await start()
    text, tokens, finish = await collect(run(engine, Ask(ids("hello!"))))
    assert (text, tokens) == ("hello!", ids("hello!"))
    assert finish.reason == "stop"
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (3, 7)


async def test_text_arrives_token_by_token(start: Any) -> None:
    engine = await start()
    async with aclosing(run(engine, Ask(ids("abc")))) as outputs:
        got = [output async for output in outputs]
    assert [output.text for output in got[:-1]] == ["a", "b", "c"]


async def test_rows_join_and_leave_one_batch(start: Any) -> None:
    engine = await start()
    words = ["a", "bcdefgh" * 3, "", "hello world", "x" * 40, "yz"]
    toy = Toy.latest
    toy.gate = threading.Semaphore(0)
    tasks = [asyncio.create_task(collect(run(engine, Ask(ids(word))))) for word in words]
    await in_the_loop(len(words))
    toy.gate.release(10**6)
    assert [text for text, _, _ in await asyncio.gather(*tasks)] == words
    assert max(map(len, toy.batches)) >= 4
    assert len(toy.batches[-1]) == 1  # the longest answer runs alone at last
    assert toy.slots == {}


async def test_long_prompts_do_not_stop_running_rows(start: Any) -> None:
    """Between two pieces of a long prompt every running request gets a token."""
    engine = await start()
    toy = Toy.latest
    toy.gate = threading.Semaphore(2)
    talking = run(engine, Ask(ids("a" * 60)))
    await anext(talking)
    long = asyncio.create_task(collect(run(engine, Ask(ids("b"), prompt=[1] * (2 * PREFILL_CHUNK + 5)))))
    await in_the_loop(2)
    toy.batches.clear()
    toy.gate.release(10**6)
    assert (await long)[0] == "b"
    assert toy.pieces[1:] == [1, 1, 1]
    assert len(toy.batches) >= 3
    assert toy.batches[0] == (0,)
    await collect_rest(talking)


async def test_short_prompts_are_computed_together(start: Any) -> None:
    """Every short prompt of a crowd once cost the others a step, and every row of a step woke the event loop."""
    engine = await start()
    toy, schedule = Toy.latest, engine._decode_loop._schedule
    mails: list[int] = []
    post = schedule._post
    schedule._post = lambda mail: (mails.append(len(mail)), post(mail))
    toy.gate = threading.Semaphore(0)
    answers = [asyncio.create_task(collect(run(engine, Ask(ids("abcdef"))))) for _ in range(8)]
    await in_the_loop(8)  # the first one's prompt waits at the gate, the others behind it
    toy.gate.release(10**6)
    assert [text for text, _, _ in await asyncio.gather(*answers)] == ["abcdef"] * 8
    assert toy.batches[1] == tuple(range(8))
    assert max(mails) == 8
    assert len(mails) <= 2 * (len(toy.batches) + 1)


async def test_running_rows_keep_their_pace_while_a_prompt_is_encoded(start: Any) -> None:
    """Pictures were once seen and sounds heard on the thread that steps: every stream stood still meanwhile."""
    engine = await start()
    toy = Toy.latest
    toy.gate = threading.Semaphore(2)
    talking = run(engine, Ask(ids("a" * 60)))
    await anext(talking)
    slow = asyncio.create_task(collect(run(engine, Ask(ids("b"), broken="slow"))))
    await settled(lambda: engine.stats().running == 2)
    toy.gate.release(10**6)
    assert len(await collect_rest(talking)) == 60  # to its end: no step waits for the other's prompt
    assert not slow.done()
    toy.encoded.set()
    assert (await slow)[0] == "b"


async def test_a_hung_encoding_is_unhealthy_although_rows_go_on(start: Any, clock: Clock) -> None:
    engine = await start(stall_s=60)
    slow = asyncio.create_task(collect(run(engine, Ask(ids("b"), broken="slow"))))
    await settled(lambda: len(engine._admission._calls) == 1)
    slow.cancel()  # its client gives up
    clock.pass_by(90)
    talking = run(engine, Ask(ids("a" * 60)))
    with pytest.raises(StageFailedError, match="hangs"):
        await engine.check_health()
    Toy.latest.encoded.set()
    assert (await collect(talking))[0] == "a" * 60
    await engine.check_health()


async def collect_rest(outputs: Any) -> list[Output]:
    return [output async for output in outputs]


async def test_more_requests_than_slots_wait(start: Any) -> None:
    engine = await start(max_num_seqs=2)
    texts = [character * 5 for character in "abcdefg"]
    got = await asyncio.gather(*(collect(run(engine, Ask(ids(text)))) for text in texts))
    assert [text for text, _, _ in got] == texts
    assert max(map(len, Toy.latest.batches)) == 2


async def test_full_queue_refuses_before_upstream_runs(start: Any) -> None:
    engine = await start(max_num_seqs=1, max_queue=0)
    running = run(engine, Ask(ids("a" * 100)))
    await anext(running)
    asked = []

    async def upstream() -> AsyncIterator[Any]:
        asked.append(1)
        yield Ask(ids("b"))

    with pytest.raises(SaturatedError):
        await anext(engine.generate(Request("q", 1), {"request": upstream()}))
    assert not asked
    await running.aclose()


@pytest.mark.parametrize("stop_id", [STOP, STOP_2])
async def test_every_stop_id_ends_and_id_0_does_not(start: Any, stop_id: int) -> None:
    engine = await start()
    text, _, finish = await collect(run(engine, Ask([*ids("hello!!"), stop_id, *ids("never")])))
    assert text == "hello!!"
    assert finish.reason == "stop"


async def test_ignore_eos_speaks_no_special_token(start: Any) -> None:
    engine = await start()
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)
    text, tokens, finish = await collect(run(engine, Ask([*ids("ab"), STOP, STOP_2, *ids("cd")]), sampling))
    assert text == "abcd"
    assert tokens == [*ids("ab"), STOP, STOP_2, *ids("cd")]
    assert (finish.reason, finish.usage.completion_tokens) == ("length", 6)


@pytest.mark.parametrize(
    ("answer", "stop", "text"),
    [
        ("one two three four", ("three",), "one two "),
        ("one two th", ("three",), "one two th"),  # held back, then it was none
        ("ththree", ("three",), "th"),
        ("aabaabaac", ("aabaac",), "aab"),
        ("abcd", ("bcx", "cd"), "ab"),
        ("abc", ("abc",), ""),
        ("abc", ("",), "abc"),
    ],
)
async def test_text_ends_before_the_stop_string(start: Any, answer: str, stop: tuple[str, ...], text: str) -> None:
    """cases.md C40: nothing of the stop string, whole or begun, is ever given out."""
    engine = await start()
    got, tokens, finish = await collect(run(engine, Ask(ids(answer)), SamplingParams(temperature=0, stop=stop)))
    assert got == text
    assert tokens == ids(text)
    assert finish.reason == "stop"


async def test_characters_come_whole(start: Any) -> None:
    engine = await start()
    euro = [EURO, EURO + 1, EURO + 2]
    text, tokens, _ = await collect(run(engine, Ask([*ids("a"), *euro, *ids("b"), EURO])))
    assert text == "a€b"
    assert tokens == [*ids("a"), *euro, *ids("b")]


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_max_tokens(start: Any, max_tokens: int) -> None:
    engine = await start()
    text, _, finish = await collect(
        run(engine, Ask(ids("hello")), SamplingParams(temperature=0, max_tokens=max_tokens))
    )
    assert text == "hello"[:max_tokens]
    assert (finish.reason, finish.usage.completion_tokens) == ("length", max_tokens)


async def test_max_tokens_is_clamped_to_the_model(start: Any) -> None:
    engine = await start(max_model_len=16)
    sampling = SamplingParams(temperature=0, max_tokens=10**9)
    text, _, finish = await collect(run(engine, Ask(ids("a" * 50), prompt=[1] * 10), sampling))
    assert (text, finish.reason) == ("a" * 6, "length")
    assert (await collect(run(engine, Ask(ids("b" * 9), prompt=[1] * 15))))[0] == "b"


@pytest.mark.parametrize("size", [0, 16, 17])
async def test_prompt_that_does_not_fit(start: Any, size: int) -> None:
    engine = await start(max_model_len=16)
    with pytest.raises(InvalidRequestError, match="15") as error:
        await collect(run(engine, Ask(ids("a"), prompt=[1] * size)))
    assert error.value.param == "messages"


async def test_seeds_are_equal_alone_and_in_a_crowd(start: Any) -> None:
    engine = await start(max_num_seqs=9)
    flat = Ask([], broken="flat")
    sampling = SamplingParams(temperature=1, max_tokens=30)
    alone = (await collect(run(engine, flat, sampling, seed=7)))[1]
    crowd = await asyncio.gather(*(collect(run(engine, flat, sampling, seed=seed)) for seed in range(9)))
    assert crowd[7][1] == alone
    assert len({tuple(tokens) for _, tokens, _ in crowd}) == 9


async def test_sampling_reaches_the_engine(start: Any) -> None:
    """cases.md C39: top_k and top_p are not thrown away."""
    engine = await start()
    flat = Ask([], broken="flat")
    for narrow in (SamplingParams(top_k=3), SamplingParams(top_p=0.05)):
        sampling = narrow.over(SamplingParams(temperature=1, max_tokens=60))
        tokens = (await collect(run(engine, flat, sampling)))[1]
        assert 1 < len(set(tokens)) <= 4
        assert min(tokens) >= STOP - 4


def test_sampler_follows_the_distribution() -> None:
    """4000 draws of three tokens, each share within 4 sigma; the noise is fixed, so this never fails by chance."""
    logits = torch.full((50,), -torch.inf)
    logits[[5, 6, 7]] = torch.tensor([0.5, 0.3, 0.2]).log()
    draws = draw(logits.expand(4000, -1), [Sampler(seed=3)] * 4000, range(4000))
    for token, share in ((5, 0.5), (6, 0.3), (7, 0.2)):
        assert abs(draws.count(token) / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5


def test_draw_is_the_gumbel_maximum_of_the_whole_vocabulary() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0))
    noise = torch.from_numpy(gumbel(11, 4, 0, torch.arange(500).numpy()))
    for scale in (1, 20):  # noise that cannot win is left out
        drawn = draw(scale * logits[None], [Sampler(seed=11, temperature=0.5)], [4])
        assert drawn == [int((scale * logits / 0.5 + noise).argmax())]


def test_repetition_penalty() -> None:
    logits = torch.tensor([2.0, 1.9, -1.0])
    sampler = Sampler(seed=0, repetition_penalty=2)
    assert sampler.penalised(logits, torch.tensor([2])).tolist() == pytest.approx([2.0, 1.9, -2.0])
    assert sampler.penalised(logits, torch.tensor([0, 0])).tolist() == pytest.approx([1.0, 1.9, -1.0])


def test_rows_of_one_draw_do_not_see_each_other() -> None:
    """Greedy, hot, narrow and broken rows together draw what each draws alone."""
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(2))
    logits[4, 7] = torch.nan
    samplers = [
        Sampler(seed=1, temperature=0),
        Sampler(seed=2),
        Sampler(seed=-3, top_k=5, temperature=1.8),
        Sampler(seed=4, top_p=0.4),
        Sampler(seed=5),
        Sampler(seed=6, top_k=1),
    ]
    alone = [draw(logits[row : row + 1], [samplers[row]], [row])[0] for row in range(6)]
    assert draw(logits, samplers, range(6)) == alone
    assert alone[4] == NOT_A_NUMBER
    assert [alone[0], alone[5]] == [int(logits[0].argmax()), int(logits[5].argmax())]


async def test_cancelling_frees_the_slot_within_one_step(start: Any) -> None:
    engine = await start(max_num_seqs=1)
    toy = Toy.latest
    outputs = run(engine, Ask(ids("a" * 200)))
    await anext(outputs)
    toy.gate = threading.Semaphore(0)  # one step may be running or waiting at the gate, or about to look at the flag
    await outputs.aclose()
    steps = len(toy.batches)
    assert engine.stats().running == 0
    toy.gate.release(10**6)
    assert (await collect(run(engine, Ask(ids("b")))))[0] == "b"
    assert len(toy.batches) - steps <= 2 + 1  # at most one of the cancelled row's and one at the gate, one of the new
    assert toy.slots == {}


async def test_cancelling_a_waiting_request(start: Any) -> None:
    engine = await start(max_num_seqs=1)
    running = run(engine, Ask(ids("a" * 200)))
    await anext(running)
    waiting = asyncio.create_task(collect(run(engine, Ask(ids("b")))))
    await settled(lambda: engine.stats().queued == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.stats().queued == 0
    await running.aclose()


@pytest.mark.parametrize(
    ("broken", "error"), [("encode", ValueError), ("step", RuntimeError), ("nan", StageFailedError)]
)
async def test_a_failing_row_fails_alone(start: Any, broken: str, error: type[Exception]) -> None:
    engine = await start()
    asks = [Ask(ids("hello world")), Ask(ids("goodbye"), broken=broken), Ask(ids("ciao"))]
    got = await asyncio.gather(*(collect(run(engine, ask)) for ask in asks), return_exceptions=True)
    assert [got[0][0], got[2][0]] == ["hello world", "ciao"]  # type: ignore[index]
    assert isinstance(got[1], error)
    assert engine.stats().running == 0
    await engine.check_health()
    assert (await collect(run(engine, Ask(ids("next")))))[0] == "next"


async def test_prompts_must_be_one(start: Any) -> None:
    engine = await start()

    async def two() -> AsyncIterator[Any]:
        yield Ask(ids("a"))
        yield Ask(ids("b"))

    with pytest.raises(StageFailedError, match="exactly one"):
        await collect(engine.generate(Request("r", 1), {"listener": two()}))


async def test_hung_step_is_unhealthy_and_idle_is_not(start: Any, clock: Clock) -> None:
    engine = await start(stall_s=60)
    toy = Toy.latest
    await collect(run(engine, Ask(ids("ab"))))
    clock.pass_by(90)
    await engine.check_health()
    toy.gate = threading.Semaphore(0)
    task = asyncio.create_task(collect(run(engine, Ask(ids("ab")))))
    await in_the_loop(2)
    clock.pass_by(90)
    with pytest.raises(StageFailedError, match="hangs"):
        await engine.check_health()
    toy.gate.release(10**6)
    await task
    await engine.check_health()


@pytest.mark.parametrize(
    "said", [{"temperature": 1e-320}, {"temperature": 1e-40}, {"repetition_penalty": 0.01}, {"top_k": 10**30}]
)
def test_extreme_parameters_draw_a_token(said: dict[str, float]) -> None:
    """Logits divided by them must not overflow: the answer then was the server's error, about NaN."""
    sampler = Sampler.of(Request("r", 1, sampling=SamplingParams(**{"top_p": 1e-9, **said})))
    logits = torch.tensor([300.0, -31.0, 299.0])
    assert draw(sampler.penalised(logits, torch.tensor([0, 1]))[None], [sampler], [0]) == [0]


async def test_a_hung_step_is_unhealthy_although_its_clients_give_up_sooner(start: Any, clock: Clock) -> None:
    """C09: each of them gave up before ``stall_s`` and took the hang along: the replica was never replaced."""
    engine = await start(stall_s=60)
    Toy.latest.gate = threading.Semaphore(0)
    for n in range(3):
        asked = asyncio.create_task(collect(run(engine, Ask(ids("ab")))))
        await in_the_loop(n + 1)
        await engine.check_health()
        asked.cancel()
        clock.pass_by(25)
    with pytest.raises(StageFailedError, match="hangs"):
        await engine.check_health()
    Toy.latest.gate.release(10**6)
    assert (await collect(run(engine, Ask(ids("ab")))))[0] == "ab"
    await engine.check_health()


async def test_slow_reader_is_not_a_hung_engine(start: Any, clock: Clock) -> None:
    engine = await start(stall_s=60)
    outputs = run(engine, Ask(ids("abc")))
    await anext(outputs)
    await a_moment()
    clock.pass_by(90)
    await engine.check_health()
    await collect_rest(outputs)


async def test_stop_fails_running_requests(start: Any) -> None:
    engine = await start(max_num_seqs=1)
    outputs = run(engine, Ask(ids("a" * 300)))
    await anext(outputs)
    Toy.latest.gate = threading.Semaphore(0)
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0.01)
    Toy.latest.gate.release(10**6)
    with pytest.raises(StageFailedError, match="stopped"):
        await collect_rest(outputs)
    await stopping
    with pytest.raises(OmniRayError):
        await engine.check_health()
    with pytest.raises(StageFailedError):
        await collect(run(engine, Ask(ids("b"))))


async def test_load_error_fails_the_start(start: Any) -> None:
    class Broken(Toy):
        def load(self) -> None:
            raise FileNotFoundError("model.safetensors")

    with pytest.raises(FileNotFoundError):
        await start(Broken)


def test_detokenizer_holds_ids_with_their_text() -> None:
    """A token that lies wholly in held-back text is not given out before its text."""
    stream = Detokenizer(lambda token: ALPHABET[token].encode(), ("abc", "bd"))
    assert stream.push(ids("a")[0]) is None
    assert stream.push(ids("b")[0]) is None
    assert stream.push(ids("d")[0]) == TextChunk(0, "a", tuple(ids("a")))
    assert stream.stopped


def test_request_defaults_are_openai_s() -> None:
    assert Sampler.of(Request("r", 5)) == Sampler(5, 1.0, None, 1.0, 1.0)
    assert replace(Sampler(5), temperature=0).temperature == 0


class TestResume:
    """A request goes on where another replica died: the same answer, and only what is new is computed."""

    ANSWER = "how much wood would a woodchuck chuck, if a woodchuck could chuck wood? " * 3

    async def record(self, engine: AREngine, tokens: int, ask: Ask, **more: Any) -> tuple[Any, Resume]:
        """The undisturbed answer, and the record of its first chunks, ``tokens`` tokens or a few more."""
        outputs = [output async for output in run(engine, ask, **more)]
        text: list[TextChunk] = []
        for output in outputs:
            if isinstance(output, TextChunk) and sum(len(chunk.token_ids) for chunk in text) < tokens:
                text.append(output)
        return outputs, Resume(text=tuple(text))

    @pytest.mark.parametrize("tokens", [1, 2, 130, 200])
    async def test_goes_on_behind_its_record(self, start: Any, tokens: int) -> None:
        engine, ask = await start(), Ask([*ids(self.ANSWER), EURO, EURO + 1, EURO + 2])
        whole, resume = await self.record(engine, tokens, ask)
        Toy.latest.batches.clear()
        assert [output async for output in run(engine, ask, resume=resume)] == whole
        assert len(Toy.latest.batches) == len(ask.answer) + 1 - len(resume.token_ids)

    async def test_the_penalty_knows_the_record(self, start: Any) -> None:
        engine, ask = await start(), Ask(ids("abc"), broken="flat")
        how = {"sampling": SamplingParams(repetition_penalty=1.3, max_tokens=40), "seed": 3}
        whole, resume = await self.record(engine, 20, ask, **how)
        assert [output async for output in run(engine, ask, resume=resume, **how)] == whole

    async def test_deterministic_makes_every_step_again(self, start: Any) -> None:
        """Steps and prompts round differently, so equal bytes need equal calls."""
        engine, ask = await start(deterministic=True), Ask(ids(self.ANSWER))
        whole, resume = await self.record(engine, 50, ask)
        Toy.latest.batches.clear()
        assert [output async for output in run(engine, ask, resume=resume)] == whole
        assert len(Toy.latest.batches) == len(ask.answer)

    async def test_another_answer_is_refused(self, start: Any) -> None:
        """Deterministic, and yet not the same: an error, not a text that changes in the middle."""
        engine = await start(deterministic=True)
        _, resume = await self.record(engine, 5, Ask(ids("hello world")))
        with pytest.raises(StageFailedError, match="otherwise than the replica that died"):
            await collect(run(engine, Ask(ids("help world")), resume=resume))

    @pytest.mark.parametrize("limit", [20, None])
    async def test_an_answer_that_had_ended_makes_no_step(self, start: Any, limit: int | None) -> None:
        engine, ask = await start(), Ask(ids("one two three four five"))
        whole = [output async for output in run(engine, ask, SamplingParams(temperature=0, max_tokens=limit))]
        assert isinstance(whole[-1], Finish)
        Toy.latest.batches.clear()
        resume = Resume(text=tuple(chunk for chunk in whole if isinstance(chunk, TextChunk)), finish=whole[-1])
        assert [output async for output in run(engine, ask, resume=resume)] == whole
        assert not Toy.latest.batches

    async def test_a_limit_reached_in_the_record(self, start: Any) -> None:
        """All tokens had come, but not the end."""
        engine, ask = await start(), Ask(ids("one two three four five"))
        how = {"sampling": SamplingParams(temperature=0, max_tokens=7)}
        whole, resume = await self.record(engine, 99, ask, **how)
        assert [output async for output in run(engine, ask, resume=resume, **how)] == whole

    async def test_others_go_on_meanwhile(self, start: Any) -> None:
        engine, ask = await start(), Ask(ids(self.ANSWER))
        _, resume = await self.record(engine, 200, ask)
        both = [collect(run(engine, ask, resume=part)) for part in (resume, None, resume, None)]
        answers = await asyncio.gather(*both)
        assert {answer[0] for answer in answers} == {self.ANSWER}


async def test_a_loop_that_died_is_a_dead_engine(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a request's error: every request in it and every later one fails, so the replica must go."""
    engine = await start()
    monkeypatch.setattr(engine._decode_loop._schedule, "_drop_cancelled", lambda: 1 / 0)
    with pytest.raises(EngineDiedError, match="the decode loop died"):
        await collect(run(engine, Ask(ids("hello"))))
    with pytest.raises(EngineDiedError) as info:
        await engine.check_health()
    assert info.value.stage == "thinker"


async def test_hung_is_unhealthy_busy_and_idle_are_not(start: Any, clock: Clock) -> None:
    """C09: a step that does not return within ``stall_s``, whoever still waits for it."""
    engine = await start(stall_s=60)
    await engine.check_health()
    toy = Toy.latest
    toy.gate = threading.Semaphore(1)  # for the prompt
    slow = asyncio.create_task(collect(run(engine, Ask(ids("hello there")))))
    await settled(lambda: len(toy.pieces) == 1)
    for steps in range(1, 7):  # one in 25 seconds: slow, and no hang
        await a_moment()  # it begins
        clock.pass_by(25)
        await engine.check_health()
        toy.gate.release()
        await settled(lambda steps=steps: len(toy.batches) == steps)
    await a_moment()
    clock.pass_by(90)
    with pytest.raises(StageFailedError, match="hangs"):
        await engine.check_health()
    toy.gate.release(1000)
    await slow
    await engine.check_health()
    clock.pass_by(90)
    await engine.check_health()


class Broadcasting(Toy):
    """In company it gives the logits of its first row only, which every row's noise could be added to."""

    def step(self, slots: Sequence[int], last_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        return super().step(slots, last_ids, positions)[:1]


async def test_logits_of_one_row_are_never_broadcast(start: Any) -> None:
    """C01: the rows of that step fail, all of them, and the engine goes on."""
    engine = await start(model=Broadcasting)
    Toy.latest.gate = threading.Semaphore(0)
    together = [asyncio.create_task(collect(run(engine, Ask(ids(answer))))) for answer in ("abcd", "wxyz")]
    await in_the_loop(2)
    Toy.latest.gate.release(10**6)
    outcomes = await asyncio.gather(*together, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [BatchLengthError, BatchLengthError]
    assert (await collect(run(engine, Ask(ids("alone")))))[0] == "alone"
