"""Chat: shapes, streaming, order of ends, usage, failures; fields that are refused, honoured or ignored."""

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
import soundfile
from api_fakes import (
    FULL,
    RATE,
    SPEECH_ONLY,
    TEXT_ONLY,
    ZERO_WAV,
    FakeDispatcher,
    audio,
    b64,
    check_error,
    client_of,
    pcm,
    sse_of,
    text,
    wav,
)

from omni_ray.config.ingress import IngressConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.types import AudioChunk, MediaPart, TextPart
from omni_ray.errors import NotReadyError, ReplicaDiedError, SaturatedError, StageFailedError, StageTimeoutError
from omni_ray.serve.api import live
from omni_ray.serve.events import OutputEvent

URL = "/v1/chat/completions"
CH: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "one two"}]}
BOTH = {"modalities": ["text", "audio"], "audio": {"voice": "a", "format": "pcm16"}}


def text_first() -> list[Any]:
    return [*text("one ", "two"), *audio(1920, 4063, 1697)]


def audio_first() -> list[Any]:
    words = text("one ", "two")
    return [words[0], *audio(1920, 4063, 1697), *words[1:]]


async def post(fake: FakeDispatcher, body: Any) -> Any:
    async with client_of(fake) as client:
        return await client.post(URL, json=body)


@pytest.mark.parametrize(
    ("extra", "status", "param"),
    [
        ({"modalities": ["video"]}, 400, "modalities"),
        ({"modalities": [123]}, 400, "modalities"),
        ({"modalities": "audio"}, 400, "modalities"),
        ({"modalities": ["transcript"]}, 400, "modalities"),
        ({"modalities": {}}, 400, "modalities"),
        ({"model": "nope"}, 404, "model"),
        ({"model": None}, 400, "model"),
        ({"model": 1}, 400, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": None}, 400, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": " \n\u200b"}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 1}]}, 400, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            400,
            "messages[1].role",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}, {"role": "user", "content": "y"}]},
            400,
            "messages[0].tool_calls",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, 400, "messages[0].content[0].video_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, 400, "messages[0].content[0].type"),
        ({"n": 2}, 400, "n"),
        ({"n": 0}, 400, "n"),
        ({"n": -1}, 400, "n"),
        ({"n": True}, 400, "n"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": "16"}, 400, "max_tokens"),
        ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens"),
        ({"seed": -1}, 400, "seed"),
        ({"seed": 2**63}, 400, "seed"),
        ({"seed": 1.5}, 400, "seed"),
        ({"temperature": "1.5"}, 400, "temperature"),
        ({"temperature": True}, 400, "temperature"),
        ({"temperature": 2.01}, 400, "temperature"),
        ({"top_p": -0.1}, 400, "top_p"),
        ({"top_k": 0}, 400, "top_k"),
        ({"repetition_penalty": 0.001}, 400, "repetition_penalty"),
        ({"ignore_eos": "yes"}, 400, "ignore_eos"),
        ({"stop": [""]}, 400, "stop[0]"),
        ({"stop": 3}, 400, "stop"),
        ({"stop": ["x"] * 17}, 400, "stop"),
        ({"stream": "yes"}, 400, "stream"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty"),
        ({"presence_penalty": -1}, 400, "presence_penalty"),
        ({"logprobs": True}, 400, "logprobs"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"logit_bias": {"1": 5}}, 400, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"response_format": "wav"}, 400, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"functions": [{"name": "f"}]}, 400, "functions"),
        ({"web_search_options": {}}, 400, "web_search_options"),
        ({"priority": 1.0}, 400, "priority"),
        ({"priority": -1}, 400, "priority"),
        ({"priority": 2**31}, 400, "priority"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 257}]},
            400,
            "messages[0].content",
        ),
        ({"tools": [{}] * 129}, 400, "tools"),
        ({"fault": {"at": "1"}}, 400, "fault.at"),
        ({"fault": {}}, 400, "fault.at"),
        ({"fault": {"at": 1, "typo": 2}}, 400, "fault.typo"),
        ({"audio": {"voice": "zz"}}, 400, "audio.voice"),
        ({"audio": {"voice": None}}, 400, "audio.voice"),
        ({"modalities": ["audio"], "audio": {"voice": "a", "format": "aac"}}, 400, "audio.format"),
        ({"modalities": ["audio"], "audio": {"format": "flac"}, "stream": True}, 400, "audio.format"),
        ({"modalities": ["audio"], "audio": {"format": 1}}, 400, "audio.format"),
        ({"audio": "wav"}, 400, "audio"),
    ],
)
async def test_refused_before_anything_starts(extra: dict[str, Any], status: int, param: str) -> None:
    """C42: the code is the status. C43: modalities. C45: the audio block. C46: voices. C47: blanks. C51: n."""
    fake = FakeDispatcher(script=text_first())
    error = check_error(await post(fake, {**CH, **extra}), status, param)
    assert fake.requests == []
    assert fake.active == 0
    if param == "modalities":
        assert "text, audio" in error["message"]
    if param == "audio.format":
        assert "wav" in error["message"]
    if param == "audio.voice":
        assert "a, b, alloy" in error["message"]


@pytest.mark.parametrize(
    "body", ['{"temperature": NaN', '{"temperature": Infinity', '{"temperature": 1e999', '{"temperature": -Infinity']
)
async def test_numbers_must_be_finite(body: str) -> None:
    """C50: pydantic lets NaN through by default."""
    fake = FakeDispatcher(script=text_first())
    async with client_of(fake) as client:
        response = await client.post(
            URL,
            content=body + ', "model": "m", "messages": [{"role": "user", "content": "x"}]}',
            headers={"content-type": "application/json"},
        )
    check_error(response, 400, "temperature")


@pytest.mark.parametrize(
    ("extra", "kinds", "content"),
    [
        ({}, ["text"], "one two"),
        ({"modalities": None}, ["text"], "one two"),
        ({"modalities": []}, ["text"], "one two"),
        ({"modalities": ["text", "text"]}, ["text"], "one two"),
        ({"modalities": ["audio", "audio"]}, ["text", "audio"], None),
        ({"modalities": ["audio", "text"]}, ["text", "audio"], "one two"),
    ],
)
async def test_one_choice_whatever_was_asked(extra: dict[str, Any], kinds: list[str], content: str | None) -> None:
    """C43, C44: missing, null and empty are text; doubles collapse; with text alone the talker is not in the plan."""
    fake = FakeDispatcher(script=text_first())
    body = (await post(fake, {**CH, **extra})).json()
    assert [kind for kind, _ in fake.plans[0].outputs] == kinds
    assert fake.plans[0].names() == (("thinker",) if kinds == ["text"] else ("thinker", "talker"))
    [choice] = body["choices"]
    assert body["object"] == "chat.completion"
    assert choice["index"] == 0
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == content
    if kinds == ["text"]:
        assert "audio" not in choice["message"]
        assert body["usage"]["total_tokens"] == 7
        return
    spoken = choice["message"]["audio"]
    assert set(spoken) == {"id", "data", "transcript", "expires_at"}
    assert spoken["transcript"] == "one two"
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(spoken["data"])), dtype="int16")
    assert rate == RATE
    assert samples.astype("<i2").tobytes() == pcm(0, 7680)  # a whole WAV by default, true sizes
    assert body["usage"]["completion_tokens_details"]["audio_tokens"] == 3
    assert body["usage"]["total_tokens"] == 5 + 2 + 3


@pytest.mark.parametrize("script", [text_first(), audio_first()], ids=["text first", "audio first"])
@pytest.mark.parametrize("modalities", [["text", "audio"], ["audio"], ["text"]])
async def test_stream_shapes(script: list[Any], modalities: list[str]) -> None:
    """C56: one last chunk with usage. C57: one finish reason, after whatever ended last; one [DONE]."""
    fake = FakeDispatcher(script=script)
    request = {**CH, **BOTH, "modalities": modalities, "stream": True, "stream_options": {"include_usage": True}}
    response = await post(fake, request)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, usage, done = sse_of(response.text)
    assert done == "[DONE]"
    assert response.text.count("[DONE]") == 1
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 5
    assert usage["usage"]["completion_tokens"] == (5 if "audio" in modalities else 2)
    assert usage["usage"]["completion_tokens_details"]["text_tokens"] == 2
    assert usage["usage"]["completion_tokens_details"]["audio_tokens"] == (3 if "audio" in modalities else 0)
    assert all(c["usage"] is None for c in chunks)
    assert {c["object"] for c in [*chunks, usage]} == {"chat.completion.chunk"}
    assert len({c["id"] for c in [*chunks, usage]}) == 1
    assert all(c["modality"] in modalities + ["text"] * ("audio" in modalities) for c in [*chunks, usage])
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0]["role"] == "assistant"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert deltas[-1] == {}
    said = "".join(d.get("content") or "" for d in deltas)
    assert said == ("one two" if "text" in modalities else "")
    sound = [d["audio"] for d in deltas if "audio" in d]
    if "audio" not in modalities:
        assert sound == []
        return
    assert "".join(s.get("transcript", "") for s in sound) == "one two"
    pieces = [base64.b64decode(s["data"]) for s in sound if "data" in s]
    assert all(len(piece) % 2 == 0 for piece in pieces)
    assert b"".join(pieces) == pcm(0, 7680)
    assert [s["id"] for s in sound if "id" in s] == [sound[0]["id"]]
    assert list(sound[-1]) == ["expires_at"]


@pytest.mark.parametrize(("format", "magic"), [("wav", b"RIFF"), ("mp3", b"\xff"), ("opus", b"OggS")])
async def test_other_formats_stream_as_one_file(format: str, magic: bytes) -> None:
    fake = FakeDispatcher(script=text_first())
    response = await post(fake, {**CH, "modalities": ["audio"], "audio": {"format": format}, "stream": True})
    deltas = [c["choices"][0]["delta"] for c in sse_of(response.text)[:-1]]
    data = b"".join(base64.b64decode(d["audio"]["data"]) for d in deltas if "data" in d.get("audio", {}))
    assert data.startswith(magic)
    assert data.count(b"RIFF") == (format == "wav")
    samples, rate = soundfile.read(io.BytesIO(data))
    assert rate == RATE
    assert abs(len(samples) - 7680) <= (0 if format == "wav" else 3000)


async def test_pcm_of_another_rate_is_24_khz_mono() -> None:
    """A chat chunk has no field for the rate, and OpenAI's clients assume 24 kHz mono."""
    fake = FakeDispatcher(script=[*text("one"), *audio(4800, 4801, 4799, rate=48_000, channels=2, scale=0.5)])
    response = await post(fake, {**CH, **BOTH, "stream": True})
    deltas = [c["choices"][0]["delta"] for c in sse_of(response.text)[:-1]]
    data = b"".join(base64.b64decode(d["audio"]["data"]) for d in deltas if "data" in d.get("audio", {}))
    assert len(data) == 7200 * 2


async def test_audio_options_with_text_are_checked_and_named() -> None:
    """C45."""
    fake = FakeDispatcher(script=text_first())
    response = await post(fake, {**CH, "audio": {"voice": "b", "format": "wav"}, "user": "u", "foo\u00e9\n,": 1})
    assert response.status_code == 200
    assert response.headers["x-omni-ray-ignored"] == "audio,foo???,user"
    many = await post(fake, {**CH, **{f"x{i:02}": 1 for i in range(30)}})
    assert many.headers["x-omni-ray-ignored"].split(",")[-1] == "..."
    nested = {**CH, "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}], "name": "n"}]}
    assert (await post(fake, nested)).headers["x-omni-ray-ignored"] == "messages.content.cache,messages.name"
    assert "x-omni-ray-ignored" not in (await post(fake, CH)).headers


async def test_what_the_stages_get() -> None:
    fake = FakeDispatcher(script=text_first())
    body = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": "Speak slowly."},
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
            {"role": "assistant", "content": "z"},
            {"role": "user", "content": "w"},
        ],
        "temperature": 0,
        "top_p": 0.1,
        "top_k": 5,
        "repetition_penalty": 1.1,
        "max_completion_tokens": 10**30,
        "stop": "three",
        "ignore_eos": True,
        "seed": 2**63 - 1,
        "priority": 3,
        "n": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logprobs": False,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": [{"type": "function"}],
        "tool_choice": "none",
        "fault": {"at": 3},
        "audio": {"voice": " NOVA "},
    }
    async with client_of(fake) as client:
        response = await client.post(URL, json=body, headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    assert response.status_code == 200, response.text
    [request] = fake.requests
    assert [(m.role, m.content) for m in request.messages] == [
        ("system", (TextPart("Speak slowly."),)),
        ("user", (TextPart("x"), TextPart("y"))),
        ("assistant", (TextPart("z"),)),
        ("user", (TextPart("w"),)),
    ]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0, 0.1, 5, 1.1)
    assert (sampling.max_tokens, sampling.stop, sampling.ignore_eos) == (2**31 - 1, ("three",), True)
    assert (request.seed, request.priority, request.voice) == (2**63 - 1, 3, "b")
    assert request.extras["fault"].at == 3
    assert request.max_audio_seconds == 300
    assert response.headers["x-omni-ray-ignored"] == "audio,tools"
    assert fake.traceparents == [f"00-{'a' * 32}-{'b' * 16}-01"]
    await post(fake, CH)
    await post(fake, CH)
    assert fake.requests[1].seed != fake.requests[2].seed
    assert fake.requests[1].request_id != fake.requests[2].request_id


@pytest.mark.parametrize(
    ("part", "ok"),
    [
        ({"type": "input_audio", "input_audio": {"data": "RAW", "format": "wav"}}, True),
        ({"type": "input_audio", "input_audio": {"data": "RAW", "format": "mp3"}}, True),
        ({"type": "input_audio", "input_audio": {"data": "data:audio/ogg;base64,RAW"}}, True),
        ({"type": "audio_url", "audio_url": {"url": "data:;base64,RAW"}}, True),
        ({"type": "audio_url", "audio_url": {"url": "http://169.254.169.254/latest?secret=1"}}, False),
        ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}, False),
        ({"type": "audio_url", "audio_url": {"url": "/etc/passwd"}}, False),
        ({"type": "audio_url", "audio_url": {"url": "data:audio/wav,RAW"}}, False),
        ({"type": "input_audio", "input_audio": {"data": "http://127.0.0.1:8265/api", "format": "wav"}}, False),
        ({"type": "input_audio", "input_audio": {"data": "not-valid-base64!!!", "format": "wav"}}, False),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, False),
        ({"type": "input_audio", "input_audio": {"data": ZERO_WAV, "format": "wav"}}, False),
        (
            {"type": "input_audio", "input_audio": {"data": b64(b"\x89PNG\r\n\x1a\n" + bytes(99)), "format": "wav"}},
            False,
        ),
        ({"type": "input_audio", "input_audio": {"data": b64(wav(np.zeros(16000 * 61))), "format": "wav"}}, False),
        ({"type": "input_audio", "input_audio": {"data": b64(wav([0.0, np.nan], subtype="FLOAT"))}}, False),
    ],
)
async def test_audio_parts(part: dict[str, Any], ok: bool) -> None:
    tone = np.sin(np.arange(16000) / 9) * 0.5
    raw = json.dumps(part).replace("RAW", b64(wav(np.stack([tone, tone], 1))))
    fake = FakeDispatcher(script=text_first())
    content = [{"type": "text", "text": "hi"}, json.loads(raw)]
    response = await post(fake, {**CH, "messages": [{"role": "user", "content": content}]})
    if not ok:
        leaf = "url" if part["type"] == "audio_url" else "data"
        error = check_error(response, 400, f"messages[0].content[1].{part['type']}.{leaf}")
        assert "secret" not in error["message"]
        assert fake.requests == []
        return
    assert response.status_code == 200, response.text
    [[clip]] = fake.clips
    assert clip.index == 0
    assert clip.sample_rate == 16000
    assert clip.samples.shape == (16000,)
    assert fake.requests[0].messages[0].content == (TextPart("hi"), MediaPart("audio", 0))
    assert fake.plans[0].names() == ("listener", "thinker")


async def test_clips_are_counted_in_order() -> None:
    fake = FakeDispatcher(script=text_first())
    clip = lambda n: {"type": "input_audio", "input_audio": {"data": b64(wav(np.full(n, 0.1)))}}  # noqa: E731
    messages = [{"role": "user", "content": [clip(100), clip(200)]}, {"role": "user", "content": [clip(300)]}]
    assert (await post(fake, {**CH, "messages": messages})).status_code == 200
    assert [(c.index, len(c.samples)) for c in fake.clips[0]] == [(0, 100), (1, 200), (2, 300)]


async def test_audio_elsewhere_than_in_user_messages() -> None:
    part = {"type": "input_audio", "input_audio": {"data": b64(wav(np.zeros(9)))}}
    body = {**CH, "messages": [{"role": "system", "content": [part]}, {"role": "user", "content": "x"}]}
    check_error(await post(FakeDispatcher(), body), 400, "messages[0].content[0]")
    body = {**CH, "messages": [{"role": "user", "content": [part]}]}
    check_error(await post(FakeDispatcher(TEXT_ONLY), body), 400, "messages")


@pytest.mark.parametrize("role", ["assistant", "system"])
async def test_blank_messages_of_others_than_the_user(role: str) -> None:
    """Clients send back answers that were broken off before their first word; OpenAI takes them."""
    fake = FakeDispatcher(script=text_first())
    blank, question = {"role": role, "content": ""}, {"role": "user", "content": "x"}
    assert (await post(fake, {**CH, "messages": [blank, question]})).status_code == 200
    given = [(m.role, m.content) for m in fake.requests[0].messages]
    assert given == [(role, (TextPart(""),)), ("user", (TextPart("x"),))]
    check_error(await post(fake, {**CH, "messages": [{"role": "system", "content": " "}]}), 400, "messages[0].content")
    blank["role"] = "user"
    check_error(await post(fake, {**CH, "messages": [blank, question]}), 400, "messages[0].content")


async def test_numbers_that_no_engine_could_compute_with() -> None:
    """The smallest and largest numbers a client may send mean what they come closest to: greedy, no limit."""
    fake = FakeDispatcher(script=text_first())
    extreme = {"temperature": 1e-320, "top_p": 0, "top_k": 10**30, "max_tokens": 10**30, "repetition_penalty": 0.01}
    assert (await post(fake, {**CH, **extreme})).status_code == 200
    [request] = fake.requests
    most = 2**31 - 1
    expected = SamplingParams(temperature=0, top_p=1e-6, top_k=most, max_tokens=most, repetition_penalty=0.01)
    assert request.sampling == expected


async def test_limits() -> None:
    """C55: of messages, of a message's text, of media and of their size."""
    limits = IngressConfig(max_messages=2, max_text_chars=5, max_audio_mb=0.001)
    fake = FakeDispatcher(script=text_first(), config=limits)
    assert (await post(fake, {**CH, "messages": [{"role": "user", "content": "12345"}]})).status_code == 200
    long = {**CH, "messages": [{"role": "user", "content": "123456"}]}
    check_error(await post(fake, long), 400, "messages[0].content")
    check_error(await post(fake, {**CH, "messages": [{"role": "user", "content": "x"}] * 3}), 400, "messages")
    part = {"type": "input_audio", "input_audio": {"data": b64(wav(np.zeros(9999)))}}
    body = {**CH, "messages": [{"role": "user", "content": [part]}]}
    check_error(await post(fake, body), 413, "messages[0].content[0].input_audio.data")
    fake = FakeDispatcher(script=text_first(), config=IngressConfig(max_media_parts=3))
    part["input_audio"] = {"data": b64(wav(np.zeros(9)))}
    body = {**CH, "messages": [{"role": "user", "content": [part] * 2}, {"role": "user", "content": [part]}]}
    assert (await post(fake, body)).status_code == 200
    body["messages"].append({"role": "user", "content": [part]})
    check_error(await post(fake, body), 400, "messages[2].content[0]")


@pytest.mark.parametrize(
    "extra", [{"temperature": 0.5}, {"max_completion_tokens": 3}, {"max_tokens": 3}, {"stop": "x"}]
)
async def test_sampling_of_a_text_that_is_always_the_same(extra: dict[str, Any]) -> None:
    """C39."""
    fake = FakeDispatcher(FULL.model_copy(update={"sampled_outputs": ("audio",)}), text_first())
    check_error(await post(fake, {**CH, **extra}), 400, *extra)
    same = await post(fake, {**CH, "temperature": 0, "top_p": 0.5, "top_k": 3, "repetition_penalty": 1, "stop": []})
    assert same.status_code == 200
    assert same.headers["x-omni-ray-ignored"] == "repetition_penalty,stop,temperature,top_k,top_p"
    assert (await post(fake, {**CH, **BOTH, **extra})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (SaturatedError("full", retry_after_s=3), 503, "3"),
        (NotReadyError("starting", retry_after_s=5), 503, "5"),
        (StageFailedError("stage talker failed"), 500, None),
        (StageTimeoutError("stage talker is silent"), 504, None),
        (ReplicaDiedError("gone"), 503, None),
        (RuntimeError("secret detail"), 500, None),
    ],
)
async def test_error_before_the_first_event_is_a_status(
    error: Exception, status: int, retry: str | None, stream: bool
) -> None:
    fake = FakeDispatcher(script=[error])
    response = await post(fake, {**CH, "stream": stream})
    body = check_error(response, status)
    assert response.headers.get("retry-after") == retry
    assert "secret" not in body["message"]
    assert fake.open == 0


@pytest.mark.parametrize("failure", [StageFailedError("stage talker failed"), RuntimeError("secret detail")])
async def test_failure_after_chunk_three(failure: Exception) -> None:
    """C29: one error event. C56: what was aborted has no finish reason and no usage."""
    fake = FakeDispatcher(script=[*text_first()[:3], *audio(10, 10, 10)[:3], failure])
    streamed = {**CH, **BOTH, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, error, done = sse_of((await post(fake, streamed)).text)
    assert len(chunks) == 6
    assert all("error" not in chunk for chunk in chunks)
    assert all(chunk["choices"][0]["finish_reason"] is None and chunk["usage"] is None for chunk in chunks)
    assert done == "[DONE]"
    assert error["error"]["code"] == 500
    assert "secret" not in error["error"]["message"]
    check_error(await post(fake, {**CH, **BOTH}), 500)
    assert fake.open == 0


async def test_stream_that_ends_without_every_finish_is_an_error() -> None:
    fake = FakeDispatcher(script=text_first()[:-1])
    *_, error, done = sse_of((await post(fake, {**CH, **BOTH, "stream": True})).text)
    assert done == "[DONE]"
    assert "talker" in error["error"]["message"]
    check_error(await post(FakeDispatcher(script=[]), CH), 500)


@pytest.mark.parametrize(
    "broken",
    [
        AudioChunk(5, np.zeros(9, np.float32), RATE),
        AudioChunk(10, np.zeros(9, np.float32), 16_000),
        AudioChunk(10, np.zeros((9, 2), np.float32), RATE),
        AudioChunk(10, np.array([np.nan], np.float32), RATE),
    ],
    ids=["snapshot", "rate", "channels", "nan"],
)
async def test_broken_audio_fails_the_request(broken: AudioChunk) -> None:
    """The stream ends well, so nothing but the broken chunk can be the reason."""
    first, end = audio(10)
    fake = FakeDispatcher(script=[*text("x"), first, OutputEvent("talker", broken), end])
    check_error(await post(fake, {**CH, **BOTH}), 500)


@pytest.mark.parametrize(("text_reason", "audio_reason"), [("length", "stop"), ("stop", "length")])
async def test_cut_answers_and_no_audio_at_all(text_reason: str, audio_reason: str) -> None:
    fake = FakeDispatcher(script=[*text(reason=text_reason), *audio(reason=audio_reason)])
    body = (await post(fake, {**CH, "modalities": ["text", "audio"], "max_tokens": 1})).json()
    assert body["choices"][0]["finish_reason"] == "length"
    samples, _ = soundfile.read(io.BytesIO(base64.b64decode(body["choices"][0]["message"]["audio"]["data"])))
    assert len(samples) == 2400
    assert not samples.any()


async def test_heartbeats(virtual_time: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.02)
    words = text("one ", "two")
    fake = FakeDispatcher(script=[words[0], 0.15, *words[1:]])
    response = await post(fake, {**CH, "stream": True})
    assert response.text.count(": ping\n\n") >= 2
    assert sse_of(response.text)[-1] == "[DONE]"


async def test_odd_text_survives() -> None:
    odd = 'a\n\n"\u2028\U0001f600\ud83d'
    fake = FakeDispatcher(script=text(odd))
    streamed = sse_of((await post(fake, {**CH, "stream": True})).text)
    assert streamed[1]["choices"][0]["delta"]["content"] == odd
    assert (await post(fake, CH)).json()["choices"][0]["message"]["content"] == odd


async def test_routes_that_the_pipeline_cannot_serve() -> None:
    error = check_error(await post(FakeDispatcher(SPEECH_ONLY), CH), 404)
    assert "takes no messages" in error["message"]
    error = check_error(await post(FakeDispatcher(TEXT_ONLY), {**CH, "modalities": ["audio"]}), 400, "modalities")
    assert "text" in error["message"]
    assert FULL.output_kinds() == ("transcript", "text", "audio")
