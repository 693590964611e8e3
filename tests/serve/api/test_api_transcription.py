"""Transcriptions: the form, its limits, and OpenAI's five answer shapes and two events."""

from typing import Any

import numpy as np
import pytest
import soundfile  # noqa: F401 - formats below are its own
from api_fakes import ONE_WAY, SPEECH_ONLY, FakeDispatcher, check_error, client_of, sse_of, transcript, wav

from omni_ray.config.ingress import IngressConfig
from omni_ray.errors import StageFailedError

URL = "/v1/audio/transcriptions"
CLIP = wav(np.sin(np.arange(32_000) / 9) * 0.5)


def heard() -> FakeDispatcher:
    return FakeDispatcher(script=transcript("Hello", "world."))


async def post(fake: FakeDispatcher, fields: dict[str, Any], clip: bytes | None = CLIP) -> Any:
    files = None if clip is None else {"file": ("a.wav", clip)}
    async with client_of(fake) as client:
        return await client.post(URL, data={"model": "m", **fields}, files=files)


async def test_json() -> None:
    fake = heard()
    response = await post(fake, {"language": "En", "temperature": "0.5", "prompt": "p", "chunking_strategy": "auto"})
    assert response.json() == {"text": "Hello world.", "usage": {"type": "duration", "seconds": 2.0}}
    assert response.headers["x-omni-ray-ignored"] == "chunking_strategy,prompt"
    [request], [[clip]] = fake.requests, fake.clips
    assert (request.language, request.sampling.temperature) == ("en", 0.5)
    assert clip.samples.shape == (32_000,)
    assert fake.plans[0].names() == ("listener",)


async def test_verbose_json() -> None:
    body = (await post(heard(), {"response_format": "verbose_json", "timestamp_granularities[]": "segment"})).json()
    assert (body["task"], body["language"], body["duration"], body["text"]) == (
        "transcribe",
        "unknown",
        2.0,
        "Hello world.",
    )
    assert [(s["id"], s["start"], s["end"], s["text"]) for s in body["segments"]] == [
        (0, 0.0, 1.0, "Hello"),
        (1, 1.0, 2.0, "world."),
    ]
    assert set(body["segments"][0]) == {
        "id", "seek", "start", "end", "text", "tokens", "temperature", "avg_logprob", "compression_ratio",
        "no_speech_prob",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("format", "content_type", "body"),
    [
        ("text", "text/plain", "Hello world.\n"),
        (
            "srt",
            "application/x-subrip",
            "1\n00:00:00,000 --> 00:00:01,000\nHello\n\n2\n00:00:01,000 --> 00:00:02,000\nworld.\n",
        ),
        (
            "vtt",
            "text/vtt",
            "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nHello\n\n00:00:01.000 --> 00:00:02.000\nworld.\n",
        ),
    ],
)
async def test_text_shapes(format: str, content_type: str, body: str) -> None:
    response = await post(heard(), {"response_format": format})
    assert response.headers["content-type"].startswith(content_type)
    assert response.text == body


async def test_a_subtitle_is_never_broken_by_its_text() -> None:
    fake = FakeDispatcher(script=transcript("a\n\nb", "00:01.000 --> 00:02.000"))
    body = (await post(fake, {"response_format": "vtt"})).text
    assert body.count("-->") == 2
    assert [block.splitlines()[-1] for block in body.split("\n\n")] == ["WEBVTT", "a b", "00:01.000 -> 00:02.000"]


async def test_stream() -> None:
    """Deltas, put together, are the text: segments have no blanks of their own."""
    response = await post(heard(), {"stream": "true"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert sse_of(response.text) == [
        {"type": "transcript.text.delta", "delta": "Hello"},
        {"type": "transcript.text.delta", "delta": " world."},
        {
            "type": "transcript.text.done",
            "text": "Hello world.",
            "usage": {"type": "tokens", "input_tokens": 7, "output_tokens": 2, "total_tokens": 9},
        },
    ]


@pytest.mark.parametrize(
    ("fields", "clip", "status", "param"),
    [
        ({"model": "nope"}, CLIP, 404, "model"),
        ({"response_format": "diarized_json"}, CLIP, 400, "response_format"),
        ({"temperature": "nan"}, CLIP, 400, "temperature"),
        ({"temperature": "2"}, CLIP, 400, "temperature"),
        ({"language": "english"}, CLIP, 400, "language"),
        ({"stream": "perhaps"}, CLIP, 400, "stream"),
        ({"stream": "true", "response_format": "srt"}, CLIP, 400, "response_format"),
        ({"timestamp_granularities[]": "word"}, CLIP, 400, "timestamp_granularities"),
        ({"include[]": "logprobs"}, CLIP, 400, "include"),
        ({}, b"", 400, "file"),
        ({}, b"not audio", 400, "file"),
        ({}, CLIP[:20], 400, "file"),
        ({}, wav([]), 400, "file"),
        ({}, wav(np.zeros(16_000 * 61)), 400, "file"),
        ({}, wav(np.zeros(600_000)), 413, "file"),
    ],
)
async def test_refused(fields: dict[str, Any], clip: bytes, status: int, param: str) -> None:
    fake = FakeDispatcher(script=transcript("x"), config=IngressConfig(max_audio_mb=1) if status == 413 else None)
    check_error(await post(fake, fields, clip), status, param)
    assert fake.requests == []


@pytest.mark.parametrize("fields", [{"temperature": "0.5"}, {"language": "de"}])
async def test_what_this_model_cannot_do(fields: dict[str, Any]) -> None:
    """C39: a listener that always hears the same, in two languages."""
    fake = FakeDispatcher(ONE_WAY, transcript("x"))
    check_error(await post(fake, fields), 400, *fields)
    assert fake.requests == []
    same = await post(fake, {"temperature": "0", "language": "FR"})
    assert same.status_code == 200
    assert same.headers["x-omni-ray-ignored"] == "temperature"


async def test_forms_that_are_none() -> None:
    async with client_of(heard()) as client:
        check_error(await client.post(URL, json={"model": "m"}), 400)
        check_error(await client.post(URL, data={"model": "m"}), 400)
        kind = {"content-type": "multipart/form-data"}
        check_error(await client.post(URL, content=b"x", headers=kind), 400)
        kind = {"content-type": "multipart/form-data; boundary=b"}
        check_error(await client.post(URL, content=b"--b\r\ngarbage", headers=kind), 400, "model")
        part = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
        for charset, param in (("undefined", None), ("utf-16", None), ('"a\0b"', None), ("UTF-8", "file")):
            kind = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
            check_error(await client.post(URL, content=part, headers=kind), 400, param)
        check_error(await client.post(URL, files={"file": ("a", CLIP)}), 400, "model")
        check_error(await client.post(URL, files={"file": (None, "text"), "model": (None, "m")}), 400, "file")
        kinds = {"file": ("a.wav", wav(np.zeros(99), format="FLAC")), "model": (None, "m")}
        assert (await client.post(URL, files=kinds)).status_code == 200


async def test_failures() -> None:
    """C29: one error event, and nothing after it."""
    check_error(await post(FakeDispatcher(script=[StageFailedError("no")]), {"stream": "true"}), 500)
    fake = FakeDispatcher(script=[*transcript("a", "b")[:1], StageFailedError("no")])
    check_error(await post(fake, {}), 500)
    delta, error = sse_of((await post(fake, {"stream": "true"})).text)
    assert delta["delta"] == "a"
    assert error["error"]["code"] == 500
    check_error(await post(FakeDispatcher(SPEECH_ONLY), {}), 404)
