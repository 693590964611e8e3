"""The unmodified openai client against a real server on localhost (C58)."""

import base64
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from api_fakes import FakeDispatcher, audio, b64, pcm, serving, sse_of, text, transcript, wav

from omni_ray.errors import SaturatedError, StageFailedError

SIZES = (1920, 4063, 1697)
ASK: Any = {"model": "m", "messages": [{"role": "user", "content": "one two"}]}
CLIP = wav(np.sin(np.arange(16_000) / 9) * 0.5)


@pytest.fixture
def fake() -> FakeDispatcher:
    return FakeDispatcher(script=[*transcript("Hi", "there."), *text("one ", "two"), *audio(*SIZES)])


@pytest.fixture
def base(fake: FakeDispatcher) -> Iterator[str]:
    with serving(fake, "sk-test") as url:
        yield url


@pytest.fixture
async def client(base: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="sk-test", max_retries=0) as made:
        yield made


async def test_chat_streamed(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        **ASK,
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "pcm16"},
        stream=True,
        stream_options={"include_usage": True},
    )
    content, words, sound, reasons, usage = "", "", b"", [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            if choice.delta.audio:
                words += choice.delta.audio.transcript or ""
                sound += base64.b64decode(choice.delta.audio.data or "")
    assert content == words == "one two"
    assert sound == pcm(0, sum(SIZES))
    assert reasons == ["stop"]
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.audio_tokens == 3


async def test_chat_stream_helper_adds_deltas_up(client: openai.AsyncOpenAI) -> None:
    """It concatenates every string and sums every number it sees twice."""
    async with client.chat.completions.stream(
        **ASK, modalities=["text", "audio"], audio={"voice": "a", "format": "pcm16"}
    ) as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "one two"
    assert message.audio is not None
    assert message.audio.transcript == "one two"
    assert message.audio.id == final.id.replace("chatcmpl-", "audio-")
    assert message.audio.expires_at == final.created


async def test_chat_buffered_with_audio_in(client: openai.AsyncOpenAI, fake: FakeDispatcher) -> None:
    message: Any = {
        "role": "user",
        "content": [{"type": "input_audio", "input_audio": {"data": b64(CLIP), "format": "wav"}}],
    }
    answer = await client.chat.completions.create(
        model="m", messages=[message], modalities=["text", "audio"], audio={"voice": "alloy", "format": "flac"}
    )
    [choice] = answer.choices
    assert choice.message.content == "one two"
    assert choice.message.audio is not None
    samples, _ = soundfile.read(io.BytesIO(base64.b64decode(choice.message.audio.data)), dtype="int16")
    assert samples.astype("<i2").tobytes() == pcm(0, sum(SIZES))
    assert len(fake.clips[0]) == 1


async def test_speech_raw(client: openai.AsyncOpenAI, tmp_path: Path) -> None:
    async with client.audio.speech.with_streaming_response.create(
        model="m", input="hi", voice="nova", response_format="pcm"
    ) as response:
        data = b"".join([piece async for piece in response.iter_bytes()])
    assert data == pcm(0, sum(SIZES))
    async with client.audio.speech.with_streaming_response.create(
        model="m", input="hi", voice="nova", instructions="calm"
    ) as response:
        await response.stream_to_file(tmp_path / "a.mp3")
    assert soundfile.info(tmp_path / "a.mp3").format == "MP3"
    whole = await client.audio.speech.create(model="m", input="hi", voice={"id": "a"}, response_format="wav", speed=1)
    assert whole.content.count(b"RIFF") == 1


async def test_speech_sse(client: openai.AsyncOpenAI) -> None:
    async with client.audio.speech.with_streaming_response.create(
        model="m", input="hi", voice="nova", response_format="pcm", stream_format="sse"
    ) as response:
        *deltas, done = sse_of("\n".join([line async for line in response.iter_lines()]))
    assert b"".join(base64.b64decode(d["audio"]) for d in deltas) == pcm(0, sum(SIZES))
    assert done["type"] == "speech.audio.done"


async def test_transcriptions(client: openai.AsyncOpenAI) -> None:
    plain = await client.audio.transcriptions.create(model="m", file=("a.wav", CLIP))
    assert plain.text == "Hi there."
    verbose = await client.audio.transcriptions.create(
        model="m", file=("a.wav", CLIP), response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert verbose.duration == 1.0
    assert verbose.segments is not None
    assert [segment.text for segment in verbose.segments] == ["Hi", "there."]
    text_only = await client.audio.transcriptions.create(model="m", file=("a.wav", CLIP), response_format="text")
    assert text_only == "Hi there.\n"
    stream = await client.audio.transcriptions.create(model="m", file=("a.wav", CLIP), stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert "".join(event.delta for event in events if event.type == "transcript.text.delta") == "Hi there."


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).owned_by == "omni_ray"


async def test_errors_are_the_clients_own(base: str, client: openai.AsyncOpenAI, fake: FakeDispatcher) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**ASK, n=2)
    assert refused.value.param == "n"
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="bad", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    fake.script = [SaturatedError("full")]
    with pytest.raises(openai.InternalServerError) as full:
        await client.chat.completions.create(**ASK)
    assert full.value.status_code == 503
    fake.script = [*text("one")[:1], StageFailedError("stage thinker failed")]
    with pytest.raises(openai.APIError, match="stage thinker failed"):
        async for _ in await client.chat.completions.create(**ASK, stream=True):
            pass
