"""Speech: framing (contract choice 1), formats, rates, blank text, truncation, failures in mid-stream, voices."""

import base64
import io
import threading
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
from api_fakes import (
    ONE_WAY,
    OPENAI_VOICES,
    RATE,
    TEXT_ONLY,
    FakeDispatcher,
    audio,
    check_error,
    client_of,
    pcm,
    serving,
    sse_of,
)

from omni_ray.config.sampling import SamplingParams
from omni_ray.errors import SaturatedError, StageFailedError
from omni_ray.serve.api.request_log import AbortedResponse

URL = "/v1/audio/speech"
SP: dict[str, Any] = {"model": "m", "input": "one two", "voice": "a", "response_format": "pcm"}
SIZES = (1920, 4063, 1697)
TOTAL = sum(SIZES)
SSE = "text/event-stream; charset=utf-8"


async def post(fake: FakeDispatcher, body: Any) -> Any:
    async with client_of(fake) as client:
        return await client.post(URL, json=body)


def spoken() -> FakeDispatcher:
    return FakeDispatcher(script=audio(*SIZES))


@pytest.mark.parametrize(
    ("extra", "status", "param"),
    [
        ({"input": ""}, 400, "input"),
        ({"input": "   "}, 400, "input"),
        ({"input": "\n\t"}, 400, "input"),
        ({"input": "\u200b"}, 400, "input"),
        ({"input": None}, 400, "input"),
        ({"input": ["a"]}, 400, "input"),
        ({"input": "a" * 4097}, 400, "input"),
        ({"input": "a" * 2**20}, 400, "input"),
        ({"model": "nope"}, 404, "model"),
        ({"voice": "zz"}, 400, "voice"),
        ({"voice": ""}, 400, "voice"),
        ({"voice": None}, 400, "voice"),
        ({"voice": 123}, 400, "voice"),
        ({"voice": {"id": "zz"}}, 400, "voice"),
        ({"voice": {}}, 400, "voice"),
        ({"voice": ["a"]}, 400, "voice"),
        ({"voice": "../../etc/passwd"}, 400, "voice"),
        *[({"response_format": f}, 400, "response_format") for f in ("aac", "ogg", "mpeg", "WAV", "", 1, ["pcm"])],
        *[({"speed": s}, 400, "speed") for s in (0.24, 4.01, 0, -1, "1.5", True)],
        *[({"stream_format": s}, 400, "stream_format") for s in ("SSE", 1, "", True, "Audio", {})],
        ({"stream": False, "stream_format": "sse"}, 400, "stream"),
        ({"stream": "true"}, 400, "stream"),
        ({"stream_format": "sse", "response_format": "flac"}, 400, "response_format"),
        ({"stream": True, "response_format": "flac"}, 400, "response_format"),
        ({"stream": True, "stream_format": "audio", "response_format": "flac"}, 400, "response_format"),
        *[({"sample_rate": s}, 400, "sample_rate") for s in (7999, 0, -1, 96_000, "8000", 8000.0)],
        ({"sample_rate": 44_100, "response_format": "opus"}, 400, "sample_rate"),
        ({"instructions": "x" * 4097}, 400, "instructions"),
        ({"seed": -1}, 400, "seed"),
        ({"seed": 9223372036854775808}, 400, "seed"),
        ({"extra_params": {"temperature": 3}}, 400, "extra_params.temperature"),
        ({"extra_params": {"temprature": 0}}, 400, "extra_params.temprature"),
        ({"extra_params": {"top_k": "5"}}, 400, "extra_params.top_k"),
        ({"extra_params": []}, 400, "extra_params"),
        *[({"temperature": t}, 400, "temperature") for t in (-0.1, 2.1, "1", True)],
        ({"temperature": 1, "extra_params": {"temperature": 0.9}}, 400, "temperature"),
        ({"top_k": 5.0}, 400, "top_k"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty"),
        ({"max_new_tokens": 0}, 400, "max_new_tokens"),
        ({"max_new_tokens": 3, "extra_params": {"max_tokens": 4}}, 400, "max_new_tokens"),
        ({"language": "English please"}, 400, "language"),
        ({"priority": -1}, 400, "priority"),
        ({"fault": {"at": 1.5}}, 400, "fault.at"),
    ],
)
async def test_refused_before_anything_starts(extra: dict[str, Any], status: int, param: str) -> None:
    """C46: voices. C47: blanks and lengths. C48: formats. C49: framing. C50: speed. C42: the code is the status."""
    fake = spoken()
    error = check_error(await post(fake, {**SP, **extra}), status, param)
    assert fake.requests == []
    if param == "voice":
        assert "a, b, alloy" in error["message"]
    if param == "response_format":
        assert "wav" in error["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
async def test_speed_must_be_finite(number: str) -> None:
    """C50."""
    async with client_of(spoken()) as client:
        content = f'{{"model": "m", "input": "x", "speed": {number}}}'
        response = await client.post(URL, content=content, headers={"content-type": "application/json"})
    check_error(response, 400, "speed")


@pytest.mark.parametrize("missing", ["input", "model"])
async def test_missing_fields(missing: str) -> None:
    check_error(await post(spoken(), {k: v for k, v in SP.items() if k != missing}), 400, missing)


@pytest.mark.parametrize(
    ("extra", "kind"),
    [
        ({}, "raw"),
        ({"stream_format": None}, "raw"),
        ({"stream_format": "audio"}, "raw"),
        ({"stream": True, "stream_format": "audio"}, "raw"),
        ({"stream": False}, "whole"),
        ({"stream": False, "stream_format": "audio"}, "whole"),
        ({"stream_format": "sse"}, "sse"),
        ({"stream": True}, "sse"),
        ({"stream": True, "stream_format": "sse"}, "sse"),
    ],
)
async def test_framing(extra: dict[str, Any], kind: str) -> None:
    """C49: ``stream_format`` decides; ``stream`` alone is SSE."""
    response = await post(spoken(), {**SP, **extra})
    assert response.status_code == 200, response.text
    assert (response.headers["x-sample-rate"], response.headers["x-channels"]) == (str(RATE), "1")
    assert response.headers["x-bit-depth"] == "16"
    if kind == "sse":
        assert response.headers["content-type"] == SSE
        assert response.text.count("event: speech.audio.delta\n") == 3
        assert response.text.count("event: speech.audio.done\n") == 1
        assert "[DONE]" not in response.text
        *deltas, done = sse_of(response.text)
        pieces = [base64.b64decode(d["audio"]) for d in deltas]
        assert [len(p) for p in pieces] == [2 * n for n in SIZES]
        assert b"".join(pieces) == pcm(0, TOTAL)
        assert done == {
            "type": "speech.audio.done",
            "usage": {"input_tokens": 0, "output_tokens": 3, "total_tokens": 3},
        }
        return
    assert response.headers["content-type"] == "audio/pcm"
    assert response.content == pcm(0, TOTAL)
    assert ("content-length" in response.headers) == (kind == "whole")
    assert ("x-accel-buffering" in response.headers) == (kind == "raw")


@pytest.mark.parametrize(
    ("format", "content_type", "magic", "streams"),
    [
        (None, "audio/mpeg", b"\xff", True),
        ("mp3", "audio/mpeg", b"\xff", True),
        ("opus", "audio/ogg", b"OggS", True),
        ("wav", "audio/wav", b"RIFF", True),
        ("flac", "audio/flac", b"fLaC", False),
    ],
)
@pytest.mark.parametrize("mode", [{}, {"stream": False}, {"stream_format": "sse"}])
async def test_formats(
    format: str | None, content_type: str, magic: bytes, streams: bool, mode: dict[str, Any]
) -> None:
    if mode == {"stream_format": "sse"} and not streams:
        return
    fake = FakeDispatcher(script=audio(*[2000] * 24))
    response = await post(fake, {**SP, "response_format": format, **mode})
    if response.headers["content-type"] == SSE:
        data = b"".join(base64.b64decode(d["audio"]) for d in sse_of(response.text)[:-1])
    else:
        data = response.content
        assert response.headers["content-type"] == content_type
        assert ("content-length" in response.headers) == (not streams or mode == {"stream": False})
    assert data.startswith(magic)
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == RATE
    if format in ("wav", "flac"):
        assert samples.astype("<i2").tobytes() == pcm(0, 48_000)
    else:
        assert abs(len(samples) - 48_000) < 3000
    if format == "wav":
        assert data.count(b"RIFF") == 1
        size = data[40:44]
        if mode == {"stream": False}:
            assert int.from_bytes(size, "little") == 96_000
            with wave.open(io.BytesIO(data)) as file:
                assert file.getnframes() == 48_000
        else:
            assert size == b"\xff\xff\xff\xff"


@pytest.mark.parametrize(("rate", "channels"), [(24_000, 1), (48_000, 1), (48_000, 2), (24_000, 2)])
async def test_the_rate_announced_is_the_rate_sent(rate: int, channels: int) -> None:
    fake = FakeDispatcher(script=audio(*SIZES, rate=rate, channels=channels))
    response = await post(fake, {**SP, "response_format": "wav"})
    assert response.headers["x-sample-rate"] == str(rate)
    assert response.headers["x-channels"] == str(channels)
    samples, read = soundfile.read(io.BytesIO(response.content), always_2d=True)
    assert read == rate
    assert samples.shape == (TOTAL, channels)
    response = await post(fake, SP)
    assert len(response.content) == TOTAL * 2 * channels


@pytest.mark.parametrize("rate", [8000, 16_000, 24_000, 48_000])
async def test_resampled_stream_equals_one_shot(rate: int) -> None:
    chunked = await post(FakeDispatcher(script=audio(*[333] * 60)), {**SP, "sample_rate": rate})
    once = await post(FakeDispatcher(script=audio(333 * 60)), {**SP, "sample_rate": rate, "stream": False})
    assert chunked.headers["x-sample-rate"] == once.headers["x-sample-rate"] == str(rate)
    assert len(chunked.content) == len(once.content) == round(333 * 60 * rate / RATE) * 2
    a, b = (np.frombuffer(r.content, "<i2").astype(int) for r in (chunked, once))
    assert np.abs(a - b).max() <= 1


async def test_a_rate_the_format_cannot_carry_becomes_the_nearest() -> None:
    fake = FakeDispatcher(script=audio(44_100, rate=44_100))
    response = await post(fake, {**SP, "response_format": "opus"})
    assert response.headers["x-sample-rate"] == "48000"
    assert soundfile.info(io.BytesIO(response.content)).samplerate == 48_000


@pytest.mark.parametrize(
    ("voice", "canonical"),
    [("a", "a"), ("A", "a"), (" A ", "a"), ({"id": "a"}, "a"), *[(v, "b") for v in OPENAI_VOICES], ("Alloy", "b")],
)
async def test_voices(voice: Any, canonical: str) -> None:
    """C46."""
    fake = spoken()
    assert (await post(fake, {**SP, "voice": voice})).status_code == 200
    assert fake.requests[0].voice == canonical


async def test_voice_left_out_is_the_default() -> None:
    fake = spoken()
    await post(fake, {k: v for k, v in SP.items() if k != "voice"})
    assert fake.requests[0].voice is None
    async with client_of(fake) as client:
        body = (await client.get("/v1/audio/voices")).json()
    assert body["voices"] == ["a", "b"]
    assert body["default"] == "a"
    assert body["aliases"]["alloy"] == "b"


async def test_what_the_stages_get() -> None:
    fake = spoken()
    body = {
        **SP,
        "input": "a" * 4096,
        "speed": 4,
        "seed": 0,
        "language": "EN",
        "extra_params": {"temperature": 0, "top_p": 0.5},
        "temperature": 0,
        "top_k": 3,
        "max_new_tokens": 9,
        "priority": 2,
        "instructions": "cheerful",
        "task_type": "Base",
        "fault": {"at": 2, "note": "n"},
    }
    response = await post(fake, body)
    assert response.status_code == 200, response.text
    [request] = fake.requests
    assert request.speech_text == "a" * 4096
    assert (request.speed, request.seed, request.language, request.priority) == (4.0, 0, "en", 2)
    assert request.sampling == SamplingParams(temperature=0, top_p=0.5, top_k=3, max_tokens=9)
    assert request.extras["fault"].note == "n"
    assert response.headers["x-omni-ray-ignored"] == "instructions,task_type"
    assert fake.plans[0].names() == ("talker",)


@pytest.mark.parametrize("text", ["!!!", "\U0001f600"])
@pytest.mark.parametrize("format", ["pcm", "wav", "mp3", "flac", "opus"])
async def test_nothing_speakable_is_a_short_silent_file(text: str, format: str) -> None:
    """C47."""
    response = await post(FakeDispatcher(script=audio()), {**SP, "input": text, "response_format": format})
    assert response.status_code == 200
    if format == "pcm":
        assert response.content == bytes(4800)
    else:
        samples, rate = soundfile.read(io.BytesIO(response.content))
        assert rate == RATE
        assert abs(len(samples) - 2400) < 3000
        assert np.abs(samples).max(initial=0) < 1e-3


async def test_overshoot_is_clipped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeDispatcher(script=audio(20_011, scale=5))
    with caplog.at_level("INFO", "ray.serve.omni_ray"):
        response = await post(fake, SP)
    samples = np.frombuffer(response.content, "<i2")
    assert samples.min() == -32767
    assert samples.max() == 32767
    assert " clipped=0" not in caplog.messages[-1]


async def test_truncation() -> None:
    """C31: words were lost, and every way of delivery says so."""
    fake = FakeDispatcher(script=audio(*SIZES, reason="length"))
    with pytest.raises(AbortedResponse):
        await post(fake, SP)
    assert fake.completed == 1
    assert sse_of((await post(fake, {**SP, "stream": True})).text)[-1]["truncated"] is True
    assert (await post(fake, {**SP, "stream": False})).headers["x-omni-ray-truncated"] == "true"
    assert "x-omni-ray-truncated" not in (await post(spoken(), {**SP, "stream": False})).headers


@pytest.mark.parametrize("extra", [{}, {"stream": True}, {"stream": False}])
async def test_error_before_any_sound_is_a_status(extra: dict[str, Any]) -> None:
    check_error(await post(FakeDispatcher(script=[StageFailedError("no")]), {**SP, **extra}), 500)
    full = await post(FakeDispatcher(script=[SaturatedError("full", retry_after_s=2)]), {**SP, **extra})
    check_error(full, 503)
    assert full.headers["retry-after"] == "2"
    broken = FakeDispatcher(script=[*audio(5)[:1], *audio(5)[:1]])  # a repeated chunk
    if extra == {"stream": False}:
        check_error(await post(broken, {**SP, **extra}), 500)


async def test_failure_in_mid_stream() -> None:
    """C29: exactly one error event, no done event; raw bytes break off."""
    events = audio(*SIZES)[:3]
    fake = FakeDispatcher(script=[*events, StageFailedError("stage talker failed")])
    *deltas, error = sse_of((await post(fake, {**SP, "stream_format": "sse"})).text)
    assert [d["type"] for d in deltas] == ["speech.audio.delta"] * 3
    assert error["type"] == "speech.audio.error"
    assert error["error"]["code"] == 500
    check_error(await post(fake, {**SP, "stream": False}), 500)
    with pytest.raises(AbortedResponse):
        await post(fake, SP)
    assert fake.open == 0


@pytest.mark.parametrize(
    "script",
    [[*audio(*SIZES)[:3], 0.05, RuntimeError("boom")], audio(*SIZES, reason="length")],
    ids=["failed", "truncated"],
)
def test_raw_bytes_that_are_not_all_cut_the_connection(script: list[Any]) -> None:
    """C29, C31: so curl exits non-zero. What was spoken is there."""
    import http.client
    import json

    fake = FakeDispatcher(script=script)
    with serving(fake) as base:
        connection = http.client.HTTPConnection(base[7:], timeout=30)
        connection.request("POST", URL, json.dumps(SP), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        with pytest.raises(http.client.IncompleteRead) as cut:
            response.read()
        assert cut.value.partial == pcm(0, TOTAL)


async def test_first_sound_leaves_at_once() -> None:
    """And every chunk on the wire is whole frames (C27, C35)."""
    import httpx

    first, *rest = audio(*SIZES)
    heard = threading.Event()

    def script(request: Any) -> Iterator[Any]:
        yield first
        for _ in range(1000):
            if not heard.is_set():
                yield 0.01
        yield from rest

    fake = FakeDispatcher(script=script)  # type: ignore[arg-type]
    with serving(fake) as base:
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", base + URL, json={**SP, "response_format": "wav"}) as response,
        ):
            pieces = []
            async for piece in response.aiter_raw():
                if not pieces:
                    assert fake.completed == 0
                    heard.set()
                pieces.append(piece)
    assert len(pieces[0]) == 44 + 2 * SIZES[0]
    assert all(len(piece) % 2 == 0 for piece in pieces)
    assert b"".join(pieces)[44:] == pcm(0, TOTAL)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"extra_params": {"temperature": 0.5}}, "extra_params.temperature"),
        ({"extra_params": {"repetition_penalty": 1.1}}, "extra_params.repetition_penalty"),
        ({"extra_params": {"max_tokens": 9}}, "extra_params.max_tokens"),
        ({"max_new_tokens": 9}, "max_new_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"language": "de"}, "language"),
    ],
)
async def test_what_this_model_cannot_do(extra: dict[str, Any], param: str) -> None:
    """C39: speech that is always spoken the same way, in two languages."""
    fake = FakeDispatcher(ONE_WAY, audio(*SIZES))
    check_error(await post(fake, {**SP, **extra}), 400, param)
    assert fake.requests == []
    said = {"extra_params": {"temperature": 0, "top_p": 0.5}, "repetition_penalty": 1}
    same = await post(fake, {**SP, "language": "En", **said})
    assert same.status_code == 200
    assert same.headers["x-omni-ray-ignored"] == "extra_params.temperature,extra_params.top_p,repetition_penalty"


async def test_route_is_absent_without_speech() -> None:
    error = check_error(await post(FakeDispatcher(TEXT_ONLY), SP), 404)
    assert "makes no audio" in error["message"]
    async with client_of(FakeDispatcher(TEXT_ONLY)) as client:
        check_error(await client.get("/v1/audio/voices"), 404)
