"""``voice_chat`` through real Ray Serve over HTTP: real weights, real speech."""

import asyncio
import base64
import io
import os
import re
import signal
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from tests.conftest import SOON, Served, Serving, wait_until
from tests.serve.test_ramp import heard, parse_sse

pytestmark = pytest.mark.weights

QUESTIONS = [
    "What is the capital of France?",
    "What color is the sky?",
    "Name a fruit that is yellow.",
    "How are you today?",
    "What do cows drink?",
    "Why do we sleep?",
    "What is a good breakfast?",
    "Who wrote Romeo and Juliet?",
    "What do birds have that fish do not?",
    "Say something nice about rain.",
]


CONFIG = {"stages": {"talker": {"deployment": SOON}, "code2wav": {"deployment": SOON}}}
"""As it is by default, but for what is killed here. Shared with ``test_readme``."""


@pytest.fixture
def app(serving: Serving) -> Served:
    return serving("voice_chat", CONFIG)


def chat(content: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": "voice_chat",
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "pcm16"},
        "stream": True,
        "max_tokens": 48,
        **more,
    }


def spoken(sound: bytes, declared: str = "wav", text: str | None = None) -> list[dict[str, Any]]:
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": declared}}
    return [part] if text is None else [part, {"type": "text", "text": text}]


def wav(samples: np.ndarray, rate: int = 24000, format: str = "WAV") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format)
    return buffer.getvalue()


def words(text: str) -> list[str]:
    return re.sub(r"[^a-z0-9' ]", " ", text.lower().replace("-", " ")).split()


def errors(said: list[str], understood: list[str]) -> int:
    """Word edit distance."""
    row = list(range(len(understood) + 1))
    for i, a in enumerate(said, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(understood, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


async def transcribe(client: httpx.AsyncClient, sound: bytes) -> str:
    answer = await client.post(
        "/v1/audio/transcriptions", files={"file": ("a.wav", sound)}, data={"model": "voice_chat"}
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text"])


async def say(client: httpx.AsyncClient, text: str, **more: Any) -> bytes:
    body = {"model": "voice_chat", "input": text, "voice": "alloy", "response_format": "pcm", **more}
    answer = await client.post("/v1/audio/speech", json=body)
    assert answer.status_code == 200, answer.text
    return answer.content


async def test_ten_questions_return_text_and_the_same_speech(app: Served) -> None:
    """Transcribing the returned speech gives back the returned text: at most 10 % word errors over ten answers."""
    wrong = total = 0
    async with app.async_client() as client:
        for question in QUESTIONS:
            response = await client.post("/v1/chat/completions", json=chat(question))
            pcm, text = heard(parse_sse(response.text))
            assert text
            understood = await transcribe(client, wav(np.frombuffer(pcm, "<i2")))
            wrong += errors(words(text), words(understood))
            total += len(words(text))
    assert wrong <= 0.1 * total, f"{wrong} word errors in {total} words"


async def test_a_spoken_question_in_every_format(app: Served) -> None:
    """C33, C34: the same question as wav, flac, mp3, ogg, stereo, other rates, wrongly declared: one answer."""
    async with app.async_client() as client:
        pcm = np.frombuffer(await say(client, QUESTIONS[0]), "<i2").astype(np.float32) / 32768
        stereo_44k = np.stack([np.interp(np.arange(0, len(pcm), 24000 / 44100), np.arange(len(pcm)), pcm)] * 2, axis=1)
        sounds = {
            "wav": wav(pcm),
            "flac": wav(pcm, format="FLAC"),
            "mp3": wav(pcm, format="MP3"),
            "ogg": wav(pcm, format="OGG"),
            "stereo": wav(stereo_44k, 44100),
        }
        answers = {}
        for name, sound in sounds.items():
            declared = name if name in ("wav", "mp3") else "wav"
            response = await client.post("/v1/chat/completions", json=chat(spoken(sound, declared), stream=False))
            assert response.status_code == 200, response.text
            (choice,) = response.json()["choices"]
            assert len(base64.b64decode(choice["message"]["audio"]["data"])) > 24000
            answers[name] = choice["message"]["content"]
    assert all("Paris" in text for text in answers.values()), answers


async def test_the_stream_equals_one_shot_synthesis(app: Served) -> None:
    """Chunks smaller than a sentence, through three processes, are sample for sample the one-shot synthesis."""
    from omni_ray.audio import pcm16
    from omni_ray.engine.codec import DecodeItem
    from omni_ray.engine.types import LatentChunk, Request

    text = "First of all, this is a longer sentence with a comma in it. Then comes another one! And the last."
    async with app.async_client() as client:
        streamed = await say(client, text, seed=7)
        assert await say(client, text, seed=7) == streamed
        assert await say(client, text, seed=8) != streamed
        pieces = []
        body = {"model": "voice_chat", "input": text, "response_format": "pcm", "seed": 7, "voice": "alloy"}
        async with client.stream("POST", "/v1/audio/speech", json=body) as response:
            pieces = [piece async for piece in response.aiter_raw()]
    assert len(pieces) > 3
    assert all(len(piece) % 2 == 0 for piece in pieces)
    request = Request("one-shot", seed=7, speech_text=text)
    codec, rows = await one_shot_parts(request)
    state, samples = codec.open(request), []
    for segment in sorted({chunk.segment for chunk in rows}):
        mine = [chunk for chunk in rows if chunk.segment == segment]
        whole = LatentChunk(mine[0].position, np.concatenate([c.rows for c in mine]), segment, ends_segment=True)
        samples += codec.decode([DecodeItem(state, whole, last=False)])
    assert pcm16(np.concatenate(samples))[0] == streamed


async def one_shot_parts(request: Any) -> tuple[Any, list[Any]]:
    """The codec, and the talker's latents for the whole text, in this process and without Serve."""
    from omni_ray.engine.base import EngineContext
    from omni_ray.engine.per_request import PerRequestEngine
    from omni_ray.engine.types import LatentChunk
    from omni_ray.models.voice_chat.code2wav import HibariCodec
    from omni_ray.models.voice_chat.options import Code2WavOptions, TalkerOptions
    from omni_ray.models.voice_chat.pipeline import PIPELINE
    from omni_ray.models.voice_chat.processors import clauses_of_speech
    from omni_ray.models.voice_chat.talker import HibariTalker

    async def nothing() -> Any:
        return
        yield

    talker = PerRequestEngine(EngineContext(PIPELINE.stage("talker"), None, HibariTalker, TalkerOptions()))
    await talker.start()
    inputs = {"request": clauses_of_speech(request, nothing())}
    rows = [o async for o in talker.generate(request, inputs) if isinstance(o, LatentChunk)]
    await talker.stop()
    codec = HibariCodec(EngineContext(PIPELINE.stage("code2wav"), None, HibariCodec, Code2WavOptions()))
    codec.load()
    return codec, rows


async def test_concurrent_answers_are_what_they_are_alone(app: Served) -> None:
    """C02, C11, C38: four chats and four speeches, in other voices, formats and with other seeds, while others leave.

    Everybody gets what he gets alone; latents return to the store's baseline.
    """
    import ray

    speech = {"model": "voice_chat", "input": "We all say this.", "voice": "alloy", "response_format": "pcm", "seed": 1}
    others = [{}, {"seed": 2}, {"voice": "coral", "response_format": "flac"}, {"input": "But I say this. And that."}]
    async with app.async_client() as client:
        bodies = [chat(q, seed=k, max_tokens=16) for k, q in enumerate(QUESTIONS[:4])]

        async def ask(body: dict[str, Any]) -> tuple[bytes, str]:
            return heard(parse_sse((await client.post("/v1/chat/completions", json=body)).text))

        async def speak(other: dict[str, Any]) -> bytes:
            response = await client.post("/v1/audio/speech", json={**speech, **other})
            assert response.status_code == 200, response.text
            return response.content

        async def leave(after_s: float) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    await client.post("/v1/audio/speech", json={**speech, "input": "I am gone before I said it. " * 9})

        alone = [await ask(body) for body in bodies]
        spoken_alone = [await speak(other) for other in others]
        free = ray.available_resources()["object_store_memory"]
        spoken, _, *together = await asyncio.gather(
            asyncio.gather(*map(speak, others)), asyncio.gather(*map(leave, (0.1, 0.5))), *map(ask, bodies)
        )
    assert spoken == spoken_alone
    assert len(set(spoken)) == len(others)
    assert [pcm for pcm, _ in together if not pcm] == []
    for (pcm, text), (pcm_alone, text_alone) in zip(together, alone, strict=True):
        if text == text_alone:  # in default mode arithmetic may differ with the batch; the sound of a text may not
            assert pcm == pcm_alone
    wait_until(lambda: ray.available_resources()["object_store_memory"] >= free - 2**20)
    wait_until(lambda: not any(app.ongoing().values()), 20)


async def test_odd_media(app: Served) -> None:
    """C05, C32: an empty clip is a 400; clips of 29 and 61 s in parallel are both heard to their end."""
    silent = base64.b64decode("UklGRiQAAABXQVZFZm10IBAAAAABAAEAgD4AAAB9AAACABAAZGF0YQAAAAA=")
    async with app.async_client(timeout=120) as client:
        empty = await client.post("/v1/chat/completions", json=chat(spoken(silent, text="hi")))
        assert empty.status_code == 400
        assert empty.json()["error"]["param"].startswith("messages")
        phrase = np.frombuffer(await say(client, "The last words are blue banana."), "<i2")
        clips = []
        for seconds in (29, 61):
            clip = np.zeros(seconds * 24000, np.int16)
            clip[-len(phrase) :] = phrase
            clips.append(wav(clip))
        texts = await asyncio.gather(*(transcribe(client, clip) for clip in clips))
    assert all("banana" in text.lower() for text in texts), texts


async def test_limits_and_short_answers(app: Served) -> None:
    """C47, C52: one token, nothing speakable, both end properly."""
    async with app.async_client() as client:
        one = await client.post("/v1/chat/completions", json=chat("Hello", max_tokens=1))
        chunks = parse_sse(one.text)
        assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["length"]
        assert len(await say(client, "!!!")) > 0
        text_only = chat("Hello", modalities=["text"], audio=None, stream=False, stop=["o"])
        answer = (await client.post("/v1/chat/completions", json=text_only)).json()["choices"][0]
        assert "o" not in answer["message"]["content"]


LONG_SPEECH = {
    "model": "voice_chat",
    "input": " ".join(f"This is sentence number {k}, and it takes a while to be spoken." for k in range(12)),
    "voice": "alloy",
    "response_format": "pcm",
    "seed": 5,
}


@pytest.fixture(scope="module")
def undisturbed(serving: Serving) -> bytes:
    with serving("voice_chat", CONFIG).client(timeout=200) as client:
        pcm = client.post("/v1/audio/speech", json=LONG_SPEECH).content
    assert len(pcm) > 40 * 48_000
    return pcm


@pytest.mark.parametrize("stage", ["talker", "code2wav"])
async def test_speech_outlives_a_stage(app: Served, undisturbed: bytes, stage: str) -> None:
    """kill -9 in mid-stream: hibari's rows are made again, its codec rebuilt, and the bytes are the same."""
    async with app.async_client(timeout=200) as client:
        received, killed = b"", False
        async with client.stream("POST", "/v1/audio/speech", json=LONG_SPEECH) as response:
            async for piece in response.aiter_raw():
                received += piece
                if not killed and len(received) > 100_000:
                    killed = True
                    for pid in app.pids(stage):
                        os.kill(pid, signal.SIGKILL)
    assert killed
    assert received == undisturbed
