"""What the host spends on a frame of 64 live streams: Python alone, the GPU's work replaced by a pause.

    python benchmarks/host_cost.py --layout apart       # the talker's process
    python benchmarks/host_cost.py --layout pair        # talker and codec in one (``colocate``)
    python benchmarks/host_cost.py --layout ingress     # chats over SSE, text and sound

The engines, stages, runs and clients are the real ones. A frame takes ``--gpu-ms`` on a clock of its own, as a GPU's
stream does: frames launched ahead follow each other, and whoever waits sleeps without the interpreter's lock. Messages
to the next process are pickled, but not sent. Thinkers are a list of tokens on a schedule. Needs Triton, and no GPU.
The ingress gets its pickled messages as fast as it takes them, and its answers go nowhere.
"""

import argparse
import asyncio
import cProfile
import json
import logging
import pickle
import pstats
import sys
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from omni_ray.config.deploy import ObserveConfig, StreamingConfig
from omni_ray.config.ingress import IngressConfig
from omni_ray.config.pipeline import StagePipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.ar import AREngine
from omni_ray.engine.base import Engine, EngineContext
from omni_ray.engine.codec import CodecEngine
from omni_ray.engine.frame_graphs import FrameGraphs
from omni_ray.engine.kernels.rows import RESULT_EXTRA, ROW_WORDS
from omni_ray.engine.options import CodecLMOptions
from omni_ray.engine.slot_decoder import RopeRows
from omni_ray.engine.types import AudioChunk, CodeFrameChunk, Finish, PromptChunk, Request, TextChunk, Usage
from omni_ray.models.qwen3_omni.captured_code2wav import CapturedCode2Wav
from omni_ray.models.qwen3_omni.captured_talker import CapturedTalker
from omni_ray.models.qwen3_omni.code2wav import Qwen3OmniCode2Wav
from omni_ray.models.qwen3_omni.eager_talker import EagerTalker
from omni_ray.models.qwen3_omni.options import Code2WavOptions
from omni_ray.models.qwen3_omni.pipeline import CODE2WAV, TALKER, resolve
from omni_ray.models.qwen3_omni.talker import Qwen3OmniTalker
from omni_ray.models.qwen3_omni.talker_slots import SlotTables
from omni_ray.registry import import_dotted
from omni_ray.serve.api.app import make_app
from omni_ray.serve.dispatcher import Dispatcher
from omni_ray.serve.effort import Effort
from omni_ray.serve.events import Caller, Envelope, Event, Opened, OutputEvent, RecordEvent
from omni_ray.serve.local_client import LocalClient
from omni_ray.serve.meters import Labels
from omni_ray.serve.planner import make_plan
from omni_ray.serve.ref_collector import RefCollector
from omni_ray.serve.running_stage import RunningStage
from omni_ray.serve.slack import Tuning
from omni_ray.serve.stage import TURN_S
from omni_ray.serve.stage_client import Client, Received
from omni_ray.serve.stage_parts import StageParts

CODEBOOKS, FRAME_RATE, SAMPLES_PER_FRAME, CODES = 16, 12.5, 1920, 2048
PROMPT, CHUNK = 20, 25
TOKENS_PER_FRAME = 0.3
TOKEN_S, AT_ONCE = 0.005, 2
CODEC_S_PER_FRAME = 0.8e-3 / FRAME_RATE
"""GPU time of the codec: benchmarks/h200.md."""


class Gpu:
    """A stream of a GPU: what is launched begins when what was launched before it is done."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self.idle_s = 0.0
        self.launches: list[float] = []

    def launch(self, seconds: float) -> float:
        """When it will be done."""
        now = time.perf_counter()
        if self.launches:
            self.idle_s += max(0.0, now - self._free_at)
        self.launches.append(now)
        self._free_at = max(now, self._free_at) + seconds
        return self._free_at


def wait_until(instant: float) -> None:
    if (left := instant - time.perf_counter()) > 0:
        time.sleep(left)


class PausedFlight:
    """See ``frame_graphs.Flight``."""

    def __init__(self, results: np.ndarray, done_at: float, count: int) -> None:
        self._results, self._done_at, self._count = results, done_at, count

    def land(self) -> np.ndarray:
        wait_until(self._done_at)
        return np.array(self._results[: self._count])


class PausedGraphs:
    """Instead of ``FrameGraphs``: a frame is a pause, codes are drawn, and a row stops after ``frames``."""

    def __init__(self, gpu: Gpu, rows: int, frames: int, frame_s: float) -> None:
        self._gpu, self._frames, self._frame_s = gpu, frames, frame_s
        self._given = np.zeros((rows, ROW_WORDS), np.int32)
        self._codes = np.random.default_rng(0).integers(0, CODES, (rows, CODEBOOKS)).astype(np.int32)

    def launch(self, table: np.ndarray) -> PausedFlight:
        self._given[: len(table)] = table
        results = np.ones((len(table), CODEBOOKS + RESULT_EXTRA), np.int32)
        results[:, :CODEBOOKS] = self._codes[: len(table)]
        results[:, CODEBOOKS] = table[:, 2] >= self._frames
        return PausedFlight(results, self._gpu.launch(self._frame_s), len(table))


class PausedFrames(CapturedTalker):
    """The real tables of rows, over frames that are pauses."""

    def __init__(self, graphs: Any, rows: int) -> None:
        self._codes, self._fixed, self._rows = CODEBOOKS, False, rows
        self._sampling = np.zeros((rows, ROW_WORDS), np.int32)
        self.graphs: FrameGraphs = graphs


class NoEagerFrames(EagerTalker):
    """Is told how rows draw, and never draws: all frames are pauses."""

    def __init__(self) -> None:
        self._to_sample_as = {}


class PausedTalker(Qwen3OmniTalker):
    """The real talker, but for weights and prompts. ``graphs`` is set by whoever measures."""

    graphs: PausedGraphs

    def load(self) -> None:
        rows = self.context.options.max_num_seqs
        self._deterministic, self._slots = False, {}
        self._captured, self._eager, self._prompts = PausedFrames(self.graphs, rows), NoEagerFrames(), None
        self._markers = type("Pads", (), {"tts_eos": 1, "tts_pad": 2, "codec_bos": 0})()
        none: Any = None
        nothing = torch.zeros(1, dtype=torch.bool), torch.zeros(1, 1)
        self._tables = SlotTables(none, none, torch.zeros(rows, 1), torch.zeros(rows, 1, dtype=torch.bool), *nothing)
        self._codec = type("Codec", (), {"weight": torch.zeros(1, 1)})()

    def kv_bytes(self) -> int:
        return 0

    def encode(self, prompt: Any) -> RopeRows:
        return RopeRows(torch.zeros(PROMPT, 1), torch.zeros(3, PROMPT), 0.0)

    def prefill(self, slot: int, piece: RopeRows, start: int) -> None:
        pass


class PausedBatch:
    """Instead of a captured batch of the codec."""

    def __init__(self, rows: int, frames: int) -> None:
        self._seconds = rows * frames * CODEC_S_PER_FRAME
        self.given = torch.zeros(rows, CODEBOOKS * frames + 3, dtype=torch.int64)
        self.sound = torch.zeros(rows, frames * SAMPLES_PER_FRAME)

    def run(self) -> None:
        time.sleep(self._seconds)


class PausedDecoder(CapturedCode2Wav):
    """The real rows and slots, over batches that are pauses."""

    def __init__(self, slots: int, rows: int, chunk_frames: Sequence[int]) -> None:
        self.nobody, self._free, self._stream = slots, list(range(slots)), None  # type: ignore[assignment]
        self.codebooks, self.samples_per_frame, self.tail = CODEBOOKS, SAMPLES_PER_FRAME, 555
        self.row_sizes = sorted({*(1 << p for p in range(rows.bit_length()) if 1 << p < rows), rows})
        self.frame_sizes = sorted(set(chunk_frames))
        self._batches: Any = {shape: PausedBatch(*shape) for shape in self.shapes()}


class PausedCode2Wav(Qwen3OmniCode2Wav):
    """The real codec, but for its weights."""

    def load(self) -> None:
        options = self.context.options
        self.use(PausedDecoder(options.max_num_seqs, options.batch_rows, options.chunk_frames), CODEBOOKS, CODES)


class Thinkers(Client):
    """Every stream's thinker: the same number of tokens at the same moments, as a batch of rows makes them.

    Faster than they would be, so that the talker never waits for text; two in a message, as the configs for GPUs say.
    """

    def __init__(self, labels: Labels, frames: int) -> None:
        super().__init__("thinker", labels, StreamingConfig())
        self._tokens = int(frames * TOKENS_PER_FRAME)
        self._queues: list[asyncio.Queue[bytes]] = []

    async def think(self) -> None:
        began = time.perf_counter()
        for first in range(0, self._tokens, AT_ONCE):
            await asyncio.sleep(began + first * TOKEN_S - time.perf_counter())
            tokens = range(first, min(first + AT_ONCE, self._tokens))
            self._send([OutputEvent("thinker", TextChunk(i, " word", (i,)), sent_at=time.time()) for i in tokens])
        self._send([OutputEvent("thinker", Finish("stop", Usage(PROMPT, self._tokens)))])

    def _send(self, events: list[Event]) -> None:
        message = pickle.dumps(events)
        for waiting in self._queues:
            waiting.put_nowait(message)

    async def _batches(self) -> AsyncGenerator[list[Event], None]:
        mine: asyncio.Queue[bytes] = asyncio.Queue()
        self._queues.append(mine)
        prompt = OutputEvent("thinker", PromptChunk(0, tuple(range(PROMPT)), limit=10**6))
        yield [Opened("thinker", "thinker", {"talker": 1}, resumable=True), prompt]
        while True:
            batch = pickle.loads(await mine.get())
            yield batch
            if isinstance(batch[-1].output, Finish):
                return

    async def stream(self, envelope: Envelope, trace: Any = None) -> AsyncGenerator[Received, None]:
        async for received in self._events(self._batches(), None, None):
            yield received

    def _latent_bytes(self, event: OutputEvent) -> int:
        return 0


async def running(
    stage: StagePipelineConfig, engine_cls: type[Engine], model_cls: type, options: Any, client: Client, labels: Labels
) -> RunningStage:
    engine = engine_cls(EngineContext(stage, None, model_cls, options))
    await engine.start()
    consumers = {"talker": {"code2wav": 1}}.get(stage.name, {})
    parts = StageParts(
        stage=stage,
        engine=engine,
        clients={client.stage: client},
        processors={edge.processor: import_dotted(edge.processor) for edge in stage.inputs},
        streaming=StreamingConfig(),
        async_chunk=True,
        sampling=SamplingParams(),
        opened=Opened(stage.name, "local", consumers, resumable=True),
        effort=Effort(),
    )
    return RunningStage(parts, labels, Tuning(), None, RefCollector())


class Threads:
    """CPU seconds of this process's threads, by what they do."""

    @staticmethod
    def now() -> dict[str, float]:
        return {
            t.name: time.clock_gettime(time.pthread_getcpuclockid(t.ident))
            for t in threading.enumerate()
            if t.ident is not None
        }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    gpu = Gpu()
    PausedTalker.graphs = PausedGraphs(gpu, args.streams, args.frames, args.gpu_ms / 1000)
    plan = make_plan(resolve({}), {"text", "audio"}, {"messages"})
    talker_labels = Labels("benchmark", "qwen3_omni", "talker", "local")
    thinkers = Thinkers(talker_labels, args.frames)
    options = CodecLMOptions(max_num_seqs=args.streams, max_model_len=args.frames + 200, reserved_seqs=0, threads=1)
    stage = talker = await running(TALKER, AREngine, PausedTalker, options, thinkers, talker_labels)
    caller = Caller("code2wav", "talker")
    if args.layout == "pair":
        labels = Labels("benchmark", "qwen3_omni", "code2wav", "local")
        client = LocalClient("talker", talker, labels, StreamingConfig())
        codec_options = Code2WavOptions(max_num_seqs=args.streams, reserved_seqs=0, batch_rows=16)
        stage = await running(CODE2WAV, CodecEngine, PausedCode2Wav, codec_options, client, labels)
        caller = Caller("ingress", "code2wav")
    sent = {"messages": 0, "bytes": 0, "samples": 0}

    async def consume(number: int) -> None:
        request = Request(str(number), seed=number, max_audio_seconds=10**6)
        envelope = Envelope(request, plan, records=True)
        async for batch in stage.run(envelope, caller):
            sent["messages"] += 1
            sent["bytes"] += len(pickle.dumps(batch, 5))
            for event in batch:
                if isinstance(event, OutputEvent) and isinstance(event.output, AudioChunk):
                    sent["samples"] += len(event.output.samples)

    RefCollector().freeze()
    tasks = [asyncio.create_task(consume(n)) for n in range(args.streams)]
    await asyncio.sleep(0.2)
    before, began = Threads.now(), time.perf_counter()
    profile = cProfile.Profile() if args.profile else nullcontext()
    with profile:
        await asyncio.gather(thinkers.think(), *tasks)
    wall, after = time.perf_counter() - began, Threads.now()
    if args.profile:
        pstats.Stats(profile).sort_stats(args.profile).print_stats(45)
    periods = np.diff(gpu.launches) * 1000
    frames = len(gpu.launches)
    cpu = {name: (after[name] - before.get(name, 0.0)) * 1000 / frames for name in after}
    if args.layout == "pair":
        assert sent["samples"] == args.streams * (args.frames * SAMPLES_PER_FRAME - 555), sent
    return {
        "layout": args.layout,
        "frames": frames,
        "ms per frame": wall * 1000 / frames,
        "median period": float(np.median(periods)),
        "p99 period": float(np.quantile(periods, 0.99)),
        "gpu idle ms per frame": gpu.idle_s * 1000 / frames,
        "cpu ms per frame": {name: round(ms, 3) for name, ms in cpu.items() if ms > 0.001},
        "cpu ms per frame, all": round(sum(cpu.values()), 3),
        "messages per frame": sent["messages"] / frames,
        "bytes per message": sent["bytes"] / sent["messages"],
        "audio s per s": args.streams * args.frames / FRAME_RATE / wall,
    }


class Codecs(Client):
    """What code2wav's replica sends, for every stream the same: a chunk of 25 frames, its record, and the tokens."""

    def __init__(self, labels: Labels, frames: int) -> None:
        super().__init__("code2wav", labels, StreamingConfig())
        sound = np.random.default_rng(0).uniform(-1, 1, CHUNK * SAMPLES_PER_FRAME).astype(np.float32)
        codes = np.zeros((CHUNK, CODEBOOKS), np.int64)
        names = ("thinker", "talker", "code2wav")
        self._messages = [pickle.dumps([Opened(name, name, {}, resumable=True) for name in names])]
        for frame in range(0, frames, CHUNK):
            tokens = range(int(frame * TOKENS_PER_FRAME), int((frame + CHUNK) * TOKENS_PER_FRAME))
            events: list[Event] = [RecordEvent("talker", CodeFrameChunk(frame, codes))]
            events += [OutputEvent("thinker", TextChunk(token, " word", (token,))) for token in tokens]
            events.append(OutputEvent("code2wav", AudioChunk(frame * SAMPLES_PER_FRAME, sound, 24_000)))
            self._messages.append(pickle.dumps(events))
        ends = (OutputEvent("thinker", Finish()), RecordEvent("talker", Finish()), OutputEvent("code2wav", Finish()))
        self._messages.append(pickle.dumps(list(ends)))

    async def ping(self, timeout_s: float, was_ready: bool) -> bool:
        return True

    async def _batches(self) -> AsyncGenerator[list[Event], None]:
        for message in self._messages:
            await asyncio.sleep(0)
            yield pickle.loads(message)

    async def stream(self, envelope: Envelope, trace: Any = None) -> AsyncGenerator[Received, None]:
        async for received in self._events(self._batches(), None, None):
            yield received

    def _latent_bytes(self, event: OutputEvent) -> int:
        return 0


class FedDispatcher(Dispatcher):
    """The real dispatcher, whose one stage is there already."""

    def __init__(self, frames: int) -> None:
        labels = Labels("benchmark", "qwen3_omni", "ingress", "local")
        config = IngressConfig(max_audio_seconds=3600)
        super().__init__(resolve({}), config, StreamingConfig(), ObserveConfig(), "qwen3_omni", {}, "127.0.0.1", labels)
        self._clients["code2wav"] = Codecs(labels, frames)  # type: ignore[assignment]

    async def _up(self, stages: Any, recovery_wait_s: float) -> None:
        pass


async def ask(app: Any, body: dict[str, Any]) -> int:
    """Bytes of the answer's body."""
    raw, sizes, never = json.dumps(body).encode(), [0], asyncio.Event()
    given = [{"type": "http.request", "body": raw, "more_body": False}]
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode()), (b"host", b"x")]

    async def receive() -> dict[str, Any]:
        if not given:
            await never.wait()
        return given.pop()

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200, message
        sizes.append(len(message.get("body", b"")))

    path = "/v1/chat/completions"
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "headers": headers, "client": ("127.0.0.1", 1),
        "server": ("x", 80), "scheme": "http", "root_path": "", "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    return sum(sizes)


async def measure_ingress(args: argparse.Namespace) -> dict[str, Any]:
    dispatcher = FedDispatcher(args.frames)
    app = make_app(dispatcher, {})
    body = {
        "model": "qwen3_omni", "messages": [{"role": "user", "content": "Talk."}], "stream": True,
        "modalities": ["text", "audio"], "audio": {"format": "pcm16", "voice": "ethan"},
    }  # fmt: skip
    await ask(app, body)
    dispatcher.started()
    profile = cProfile.Profile() if args.profile else nullcontext()
    cpu, began = time.process_time(), time.perf_counter()
    with profile:
        sizes = await asyncio.gather(*(ask(app, body) for _ in range(args.streams)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - began
    if args.profile:
        pstats.Stats(profile).sort_stats(args.profile).print_stats(45)
    await dispatcher.stop()
    audio_s = args.streams * args.frames / FRAME_RATE
    assert min(sizes) > args.frames * SAMPLES_PER_FRAME * 2
    return {
        "layout": "ingress",
        "cpu ms per audio s": round(cpu * 1000 / audio_s, 4),
        "cpu ms per frame of all streams": round(cpu * 1000 / args.frames, 4),
        "audio s per s": round(audio_s / wall),
        "MB": round(sum(sizes) / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=("apart", "pair", "ingress"), default="pair")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--gpu-ms", type=float, default=5.5)
    parser.add_argument("--switch-ms", type=float, default=TURN_S * 1000, help="the interpreter's switch interval")
    parser.add_argument("--profile", choices=("tottime", "cumtime"), help="of the event loop's thread")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    sys.setswitchinterval(args.switch_ms / 1000)
    result = asyncio.run(measure_ingress(args) if args.layout == "ingress" else measure(args))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
