"""Request bodies with anything in any field: an answer, or an error that names the field; never a 500, never a leak.

A short run here; ``FUZZ=20000 pytest tests/serve/api/test_api_fuzz.py`` for a long one.
"""

import asyncio
import copy
import json
import os
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from api_fakes import FULL, FakeDispatcher, app_of, audio, b64, text, transcript, wav
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

RUNS = int(os.environ.get("FUZZ", "150"))
fuzz = settings(max_examples=RUNS, deadline=None, database=None, suppress_health_check=list(HealthCheck))

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
HEARD = "/v1/audio/transcriptions"
CLIP = b64(wav(np.zeros(160)))
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be kind"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what is this?"},
                    {"type": "input_audio", "input_audio": {"data": CLIP, "format": "wav"}},
                ],
            },
        ],
        "modalities": ["text", "audio"],
        "audio": {"voice": "a", "format": "pcm16"},
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "repetition_penalty": 1.1,
        "max_tokens": 9,
        "stop": ["x"],
        "seed": 7,
        "priority": 1,
        "n": 1,
        "tools": [],
        "response_format": {"type": "text"},
        "fault": {"at": 1, "note": "n"},
        "ignored": {"by": ["all"]},
    },
    SPEECH: {
        "model": "m",
        "input": "hello there",
        "voice": {"id": "a"},
        "response_format": "wav",
        "speed": 1.5,
        "stream_format": "audio",
        "stream": True,
        "sample_rate": 24_000,
        "instructions": "kindly",
        "language": "en",
        "seed": 7,
        "extra_params": {"temperature": 0.5, "stop": ["x"]},
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "repetition_penalty": 1.1,
        "max_new_tokens": 9,
        "priority": 1,
        "fault": {"at": 1},
    },
}
RELATED = {
    "stream": {"stream_options", "audio", "response_format", "stream_format", "sample_rate"},
    "stream_format": {"stream", "response_format"},
    "response_format": {"sample_rate"},
    "audio": {"modalities"},
    "extra_params": {"temperature"},
    "messages": {"modalities"},
}
"""Fields that become wrong by another one's value."""

NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 1e308, -0.0, 1e-320])
)
WORDS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["../../etc/passwd", "a\r\nX-Evil: 1", "\u0000", "\ud800", "\u202e", "__proto__", "${jndi:ldap://x}", "%00",
         "' OR 1=1 --", "{{7*7}}", "file:///etc/passwd", "http://169.254.169.254/", "data:,", "data:audio/wav;base64,"]
    ),
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=12,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path in a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def put(body: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        body = body[key]
    body[path[-1]] = value


FAKE = FakeDispatcher(FULL, [*transcript("x"), *text("one"), *audio(480)])
LOOP = asyncio.Runner()
CLIENT = httpx.AsyncClient(transport=httpx.ASGITransport(app_of(FAKE), raise_app_exceptions=True), base_url="http://t")


def ask(url: str | httpx.URL, **kwargs: Any) -> httpx.Response:
    """One request to the application that all tests here share."""
    FAKE.requests.clear()
    CLIENT.cookies.clear()
    response = LOOP.run(CLIENT.request(kwargs.pop("method", "POST"), url, **kwargs))
    assert FAKE.open == FAKE.active == 0
    assert all("\r" not in value and "\n" not in value for value in response.headers.values())
    assert "x-evil" not in response.headers
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == response.status_code
        assert len(error["message"]) < 1000
        assert FAKE.requests == [], "refused after a stage was asked"
    return response


@pytest.mark.parametrize("url", BODIES)
def test_the_bodies_are_good_as_they_are(url: str) -> None:
    assert ask(url, json=BODIES[url]).status_code == 200


@fuzz
@given(st.data(), st.sampled_from(list(BODIES)))
def test_one_bad_value_is_named(data: st.DataObject, url: str) -> None:
    """Whatever is wrong with a field, the error's ``param`` leads to it."""
    body = copy.deepcopy(BODIES[url])
    path = data.draw(st.sampled_from(places(body)))
    put(body, path, data.draw(VALUES))
    raw = json.dumps(body).encode("utf-8", "backslashreplace")
    response = ask(url, content=raw, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404, 413), response.text
    if response.status_code != 200:
        param = response.json()["error"]["param"]
        if param is None:  # JSON that is none: NaN, or a lone surrogate
            assert "not valid JSON" in response.text
        else:
            field = param.partition(".")[0].partition("[")[0]
            assert field in {path[0], *RELATED.get(path[0], set())}, (param, path)


@fuzz
@given(st.data(), st.sampled_from(list(BODIES)))
def test_many_bad_values(data: st.DataObject, url: str) -> None:
    body = copy.deepcopy(BODIES[url])
    for name in data.draw(st.lists(st.sampled_from(list(body)), max_size=8, unique=True)):
        if data.draw(st.booleans()):
            del body[name]
        else:
            body[name] = data.draw(VALUES)
    raw = json.dumps(body).encode("utf-8", "backslashreplace")
    assert ask(url, content=raw, headers={"content-type": "application/json"}).status_code in (200, 400, 404, 413)


@fuzz
@given(st.binary(max_size=200), st.sampled_from([CHAT, SPEECH]), st.data())
def test_bytes_instead_of_a_body(noise: bytes, url: str, data: st.DataObject) -> None:
    whole = json.dumps(BODIES[url]).encode()
    at = data.draw(st.integers(0, len(whole)))
    raw = data.draw(st.sampled_from([noise, whole[:at] + noise, whole[:at] + noise + whole[at:], noise + whole]))
    headers = {"content-type": data.draw(st.sampled_from(["application/json", "application/json; charset=latin-1"]))}
    assert ask(url, content=raw, headers=headers).status_code in (200, 400, 404, 413)


FORM = (
    b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n'
    b'--b\r\ncontent-disposition: form-data; name="temperature"\r\n\r\n0\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="../../x.wav"\r\ncontent-type: audio/wav\r\n\r\n'
    + wav(np.zeros(160))
    + b"\r\n--b--\r\n"
)


def test_the_form_is_good_as_it_is() -> None:
    """A file name that leads elsewhere leads nowhere: names are never used."""
    headers = {"content-type": "multipart/form-data; boundary=b"}
    assert ask(HEARD, content=FORM, headers=headers).status_code == 200


@fuzz
@given(st.binary(max_size=60), st.integers(0, len(FORM)), st.integers(0, 60), st.data())
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # starlette's own files, in memory
def test_damaged_forms(noise: bytes, at: int, cut: int, data: st.DataObject) -> None:
    boundary = data.draw(st.sampled_from(["b", "", "c", "b" * 300, '"b"', "b; charset=x", "\u00ff"]))
    headers = {"content-type": f"multipart/form-data; boundary={boundary}".encode("latin-1")}
    raw = FORM[:at] + noise + FORM[at + cut :]
    assert ask(HEARD, content=raw, headers=headers).status_code in (200, 400, 404, 413)


@fuzz
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "model",
                "language",
                "response_format",
                "temperature",
                "stream",
                "file",
                "x",
                "timestamp_granularities[]",
                "include[]",
            ]
        ),
        WORDS,
        max_size=6,
    ),
    st.booleans(),
)
def test_form_fields_of_any_text(fields: dict[str, str], with_file: bool) -> None:  # fmt: skip
    files = {"file": ("../../etc/passwd\r\nX-Evil: 1", wav(np.zeros(160)))} if with_file else {"other": b"x"}
    fields = {"model": "m", **{name: value.encode("utf-8", "ignore").decode() for name, value in fields.items()}}
    response = ask(HEARD, data=fields, files=files)
    assert response.status_code in (200, 400, 404, 413)
    if response.status_code == 400:
        param = response.json()["error"]["param"]
        assert param in {"language", "response_format", "temperature", "stream", "file", "timestamp_granularities",
            "include", "model"}  # fmt: skip


LATIN = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=99)
HEADERS = st.dictionaries(
    st.sampled_from(["x-request-id", "traceparent", "authorization", "content-length", "accept", "host", "cookie",
        "content-encoding", "transfer-encoding", "x-forwarded-for", "expect", "origin", "range"]),
    LATIN.map(lambda value: value.encode("latin-1")),
    max_size=5,
)  # fmt: skip


@fuzz
@given(HEADERS)
def test_headers_of_any_text(headers: dict[str, bytes]) -> None:
    response = ask(SPEECH, content=json.dumps(BODIES[SPEECH]), headers={"content-type": "application/json", **headers})
    assert response.status_code in (200, 400, 413)


@fuzz
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_paths_of_any_text(path: str) -> None:
    """``/v1/models/{id}`` is a name that is compared; nothing is ever read from a path."""
    url = httpx.URL("http://t", raw_path=b"/v1/models/" + quote(path, safe="/.").encode())
    response = ask(url, method="GET")
    asked = response.request.url.path  # the client resolves dots itself
    assert response.status_code == (200 if asked in ("/v1/models/m", "/v1/models") else 404)


# --- nesting and size ---


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize("opened", ["[", '{"a":', '[{"a":['])
@pytest.mark.parametrize("depth", [200, 1000, 9_000, 100_000])
def test_deep_nesting(url: str, opened: str, depth: int) -> None:
    """Neither the parser's stack nor a thread's is used up: too deep is a 400, in any field."""
    closed = {"[": "]", '{"a":': "}", '[{"a":[': "]}]"}[opened]
    for field in ("ignored", "voice", "logit_bias", "messages", "tools"):
        raw = json.dumps(BODIES[url])[:-1] + f', "{field}": ' + opened * depth + "1" + closed * depth + "}"
        status = ask(url, content=raw, headers={"content-type": "application/json"}).status_code
        assert status in (200, 400)
        assert status == 400 or depth <= 200
