"""What the client reads and counts, without a cluster: dialects, the player, workloads, errors by kind, arguments."""

import asyncio
import base64
import itertools
import json
import math
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import soundfile
import uvicorn

from omni_ray.bench.answer import Answer
from omni_ray.bench.load import Run, Target, run
from omni_ray.bench.sound import SoundMeter, UnreadableAnswerError
from omni_ray.bench.sse import EventReader
from omni_ray.bench.wire import ChatReader, SpeechReader, TranscriptReader, body_of
from omni_ray.bench.workload import Asks, Workload, arrival_times
from omni_ray.cli import main
from omni_ray.errors import ConfigError
from omni_ray.playback import Playback
from omni_ray.serve.ports import free_port
from tests.bench.fake_vllm_omni import make_app, wav
from tests.clock import undisturbed

QUIET: Callable[[Answer], None] = lambda _: None  # noqa: E731


@contextmanager
def serving_here(app: object) -> Iterator[str]:
    """``app`` on a port of its own, in a thread."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join()


def measure(url: str, workload: Workload) -> Run:
    return asyncio.run(run(workload, Target(url, timeout_s=5), QUIET))


class TestPlayback:
    def test_underrun_is_the_time_a_waiting_player_stands_still(self):
        """Against a player simulated in 0.1 ms steps, over random arrivals."""
        rng = random.Random(4)
        for _ in range(30):
            arrivals, at = [], 1.0
            for _ in range(8):
                arrivals.append((at, rng.choice([0.08, 0.24, 0.5])))
                at += rng.uniform(0.0, 0.6)
            played = Playback()
            for when, seconds in arrivals:
                played.arrived(when, seconds)
            waited, have, waiting, now = 0.0, 0.0, list(arrivals), arrivals[0][0]
            while waiting:
                while waiting and waiting[0][0] <= now:
                    have += waiting.pop(0)[1]
                waited, have = (waited + 1e-4, have) if have < 1e-4 else (waited, have - 1e-4)
                now += 1e-4
            assert played.underrun_s == pytest.approx(waited, abs=3e-3)

    def test_header_alone_is_no_sound(self):
        played = Playback()
        played.arrived(1.0, 0.0)
        assert played.first is None
        played.arrived(2.0, 0.5)
        assert (played.first, played.audio_s, played.underrun_s) == (2.0, 0.5, 0.0)


class TestSoundMeter:
    @pytest.mark.parametrize("cut", [1, 3, 7, 43, 44, 45, 1000])
    def test_raw_and_wav_however_they_are_cut(self, cut):
        raw = b"\1\0" * 4800
        header = wav(0)[:40] + b"\xff\xff\xff\xff"
        for data, rate in [(raw, 24000), (header + raw, 8000), (wav(0.2), 8000)]:
            meter = SoundMeter(rate)
            pieces = [data[k : k + cut] for k in range(0, len(data), cut)]
            assert sum(meter.push(piece, is_message=False) for piece in pieces) == pytest.approx(0.2)

    def test_a_wav_file_in_every_message(self):
        meter = SoundMeter(8000)
        assert [meter.push(wav(s), is_message=True) for s in (0.1, 0.25)] == pytest.approx([0.1, 0.25])

    def test_one_header_and_then_samples_that_look_like_anything(self):
        """vLLM-Omni's single-header recipe and omni_ray's streamed WAV."""
        meter = SoundMeter(8000)
        assert meter.push(wav(0.1), is_message=True) == pytest.approx(0.1)
        assert meter.push(b"\1\0" * 2400, is_message=True) == pytest.approx(0.1)

    def test_stereo_header(self):
        header = bytearray(wav(0.2))
        header[22:24] = struct.pack("<H", 2)
        assert SoundMeter(8000).push(bytes(header), is_message=False) == pytest.approx(0.1)

    def test_float_wav_is_refused(self):
        header = bytearray(wav(0.2))
        header[34:36] = struct.pack("<H", 32)
        with pytest.raises(UnreadableAnswerError, match="16 bit"):
            SoundMeter(8000).push(bytes(header), is_message=False)


class TestDialects:
    def test_events_however_they_are_cut(self):
        body = b': ping\r\n\r\nevent: x\r\ndata: {"a": 1}\r\n\r\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
        for cut in (1, 5, len(body)):
            reader = EventReader()
            found = [d for k in range(0, len(body), cut) for d in reader.push(body[k : k + cut])]
            assert found == [b'{"a": 1}', b"one\ntwo", b"[DONE]"]

    def test_openai_chat(self):
        answer = Answer(0, sent=10.0)
        reader = ChatReader(answer)
        sound = base64.b64encode(b"\1\0" * 2400).decode()
        deltas = [
            ({"role": "assistant", "content": ""}, 10.1),
            ({"content": "Hi"}, 10.2),
            ({"audio": {"id": "a", "transcript": "Hi"}}, 10.25),
            ({"audio": {"data": sound}}, 10.3),
            ({"audio": {"data": sound}}, 10.6),
        ]
        for delta, at in deltas:
            reader.event(json.dumps({"choices": [{"delta": delta}], "usage": None}).encode(), at)
        usage = {"completion_tokens": 9, "completion_tokens_details": {"text_tokens": 4, "audio_tokens": 5}}
        reader.event(json.dumps({"choices": [], "usage": usage}).encode(), 10.7)
        reader.event(b"[DONE]", 10.7)
        assert (answer.first_text, answer.text, answer.text_tokens) == (10.2, 2, 4)
        assert (answer.playback.first, answer.playback.audio_s) == (10.3, pytest.approx(0.2))
        assert answer.playback.underrun_s == pytest.approx(0.2)

    def test_vllm_omni_chat_over_http(self):
        """Real HTTP: 5 WAV files of 0.1 s, one every 0.15 s: 4 x 0.05 s of underrun."""

        def on_time(done: Run) -> bool:
            return all(abs(answer.playback.underrun_s - 0.2) < 0.1 for answer in done.answers)

        with serving_here(make_app(5, 0.1, 0.15)) as url:
            workload = Workload(kind="chat", requests=2, warmup=1, concurrency=2)
            done = undisturbed(lambda: measure(url, workload), on_time)
        assert on_time(done), done.answers
        assert done.model == "fake-omni"
        assert len(done.warmup) == 1
        for answer in done.answers:
            assert (answer.error, answer.text, answer.text_tokens) == (None, len("Sounds like this."), 3)
            assert answer.playback.audio_s == pytest.approx(0.5)
            assert answer.first_text is not None
            assert answer.playback.first is not None
            assert answer.first_text < answer.playback.first

    def test_text_only_asks_for_no_sound_and_misses_none(self):
        with serving_here(make_app(5, 0.1, 0.15)) as url:
            done = measure(url, Workload(kind="chat", requests=1, concurrency=1, text_only=True))
        assert done.answers[0].error is None
        assert done.answers[0].playback.first is None

    def test_speech_rate_from_headers(self):
        answer = Answer(0, sent=0.0)
        SpeechReader(answer, {"x-sample-rate": "8000", "x-channels": "2"}).piece(b"\1\0" * 1600, 0.5)
        assert answer.playback.audio_s == pytest.approx(0.1)

    def test_transcripts_of_three_kinds(self):
        openai, vllm, whole = Answer(0, 0.0), Answer(1, 0.0), Answer(2, 0.0)
        reader = TranscriptReader(openai)
        reader.event(b'{"type": "transcript.text.delta", "delta": "one"}', 1.0)
        reader.event(b'{"type": "transcript.text.done", "text": "one"}', 2.0)
        TranscriptReader(vllm).event(
            b'{"object": "transcription.chunk", "choices": [{"delta": {"content": "o"}}]}', 1.0
        )
        TranscriptReader(whole).whole(b'{"text": "one"}', 2.0)
        assert [a.first_text for a in (openai, vllm, whole)] == [1.0, 1.0, 2.0]


class TestErrors:
    """Each kind once, over real HTTP."""

    @pytest.mark.parametrize(
        ("answer", "kind", "message"),
        [
            (b"HTTP/1.1 503 Busy\r\n\r\n" + b'{"error": {"message": "is full"}}', "http_503", "is full"),
            (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": "gone wrong"}\n\n', "stream_error", "gone wrong"),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n", "cut", ""),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\ndata: not it\n\n", "unreadable", "not it"),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\ndata: [DONE]\n\n", "no_audio", "without any sound"),
            (None, "timeout", "ReadTimeout"),
        ],
    )  # fmt: skip
    async def test_kind(self, answer, kind, message):
        async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            if answer is None:
                await asyncio.sleep(1)
            else:
                writer.write(answer)
                await writer.drain()
            writer.close()

        workload = Workload(kind="chat", requests=1, warmup=0, concurrency=1, words=1)
        async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            done = await run(
                workload, Target(f"http://127.0.0.1:{port}/v1", "m", timeout_s=30 if answer else 0.3), QUIET
            )
        assert done.answers[0].error == kind
        assert message in done.answers[0].message

    async def test_nobody_there(self):
        workload = Workload(kind="speech", requests=1, warmup=0, concurrency=1)
        done = await run(workload, Target(f"http://127.0.0.1:{free_port()}/v1", "m"), QUIET)
        assert done.answers[0].error == "connect"

    async def test_no_model_listed(self):
        with pytest.raises(ConfigError, match="--model"):
            await run(Workload(kind="speech", concurrency=1), Target(f"http://127.0.0.1:{free_port()}/v1"), QUIET)


class TestWorkload:
    def test_seeded(self):
        first, again, other = (
            Asks(Workload(kind="chat", concurrency=1, words=50, audio_seconds=0.5, seed=seed)) for seed in (1, 1, 2)
        )
        assert first.ask(3) == again.ask(3)
        asks = [first.ask(3), first.ask(4), first.ask(3, warm_up=True), other.ask(3)]
        assert len({a.text for a in asks}) == len({a.clip.data for a in asks if a.clip}) == 4
        assert len(first.ask(3).text.split()) == 50

    def test_poisson_arrivals(self):
        """Mean and standard deviation of exponential gaps are both 1 / rate; 6000 gaps put them within 5 %."""
        times = arrival_times(Workload(kind="speech", rate=20, requests=6001, seed=5))
        gaps = [b - a for a, b in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
        assert (times[0], mean, deviation) == (0.0, pytest.approx(0.05, rel=0.05), pytest.approx(0.05, rel=0.05))

    def test_clips(self, tmp_path: Path):
        path = tmp_path / "clip.wav"
        soundfile.write(path, [0.1, -0.1] * 4000, 8000)
        whole = Asks(Workload(kind="transcription", concurrency=1, audio=str(path))).ask(0).clip
        assert whole is not None
        assert (whole.data, whole.seconds) == (path.read_bytes(), 1.0)
        cut = Asks(Workload(kind="transcription", concurrency=1, audio=str(path), audio_seconds=0.25)).ask(0).clip
        made = Asks(Workload(kind="transcription", concurrency=1, audio_seconds=0.25)).ask(0).clip
        for clip in (cut, made):
            assert clip is not None
            (tmp_path / "read.wav").write_bytes(clip.data)
            assert soundfile.info(tmp_path / "read.wav").duration == pytest.approx(clip.seconds) == 0.25
        with pytest.raises(ConfigError, match="less than audio_seconds"):
            Asks(Workload(kind="transcription", concurrency=1, audio=str(path), audio_seconds=2))
        with pytest.raises(ConfigError, match="cannot be read"):
            Asks(Workload(kind="transcription", concurrency=1, audio=str(tmp_path / "none.wav")))

    def test_bodies(self):
        """Extra fields win; a voice that is None is not sent; a clip goes into the message."""
        workload = Workload(
            kind="chat", concurrency=1, voice=None, max_tokens=7, audio_seconds=0.1, extra_body={"max_tokens": 9}
        )
        body = body_of(workload, Asks(workload).ask(0), "m").json
        assert body is not None
        assert (body["max_tokens"], body["audio"], body["modalities"]) == (9, {"format": "pcm16"}, ["text", "audio"])
        assert [part["type"] for part in body["messages"][0]["content"]] == ["input_audio", "text"]
        speech = body_of(Workload(kind="speech", concurrency=1), Asks(workload).ask(0), "m").json
        assert speech is not None
        assert (speech["response_format"], speech["stream_format"], speech["voice"]) == ("pcm", "audio", "alloy")


class TestArguments:
    @pytest.mark.parametrize(
        ("argv", "said"),
        [
            (["--requests", "0"], "requests"),
            (["--concurrency", "2", "--rate", "3"], "either concurrency"),
            (["--extra-body", "{"], "--extra-body"),
            (["--api-key-env", "NO_SUCH_VARIABLE_HERE"], "NO_SUCH_VARIABLE_HERE"),
        ],
    )
    def test_mistakes_are_answered_before_anything_is_sent(self, capsys, argv, said):
        assert main(["bench", "speech", "--url", "http://127.0.0.1:9/v1", "--model", "m", *argv]) == 2
        assert said in capsys.readouterr().err

    def test_definitions(self, capsys):
        assert main(["bench", "definitions"]) == 0
        assert "audio_underrun_s" in capsys.readouterr().out
