"""``qwen3_omni`` on the tiny checkpoint, through real Ray Serve over HTTP: upstream's tokens, codes and samples."""

import asyncio
import base64
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from omni_ray.config.pipeline import VideoSampling
from omni_ray.engine.types import AudioClip, MediaPart, Message, TextPart, VideoClip
from omni_ray.models.qwen3_omni.prompt import ChatPrompt
from omni_ray.video import decode_sound, decode_video
from tests.conftest import SOON, Served, Serving, wait_until
from tests.serve.test_ramp import heard, parse_sse
from tests.videos import hum, made_video

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "qwen3_omni"))
from chats import CHATS, PICTURE_CHATS, RATE

pytestmark = pytest.mark.weights

TEXT_TOKENS, FRAMES = 14, 40
KINDS = ("text", "several turns", "audio", "image", "audio and image", "video with sound")


@dataclass
class Reference:
    """What the upstream model says in one piece: text tokens, codes, and one ``code2wav(codes)`` call's samples."""

    text: str
    samples: NDArray[np.float32]
    messages: list[dict[str, Any]]


def film() -> tuple[ChatPrompt, bytes]:
    """A chat with a video that is heard too, as decoded and as a client sends it."""
    pictures = np.random.default_rng(3).integers(0, 256, (50, 48, 64, 3), np.uint8)
    data = made_video(pictures=pictures, fps=25, sound=hum(2))
    sampling = VideoSampling()
    frames = decode_video(data, param="", choose=sampling.indices, max_seconds=9, max_pixels=10**6)
    sound = decode_sound(data, param="", sample_rate=RATE, max_seconds=9)
    message = Message("user", (TextPart("Say"), MediaPart("video", 0)))
    return ChatPrompt(
        (message,), {0: AudioClip(0, sound, RATE)}, {}, {0: VideoClip(0, frames, sampling.fps)}
    ), data  # fmt: skip


def chat_of(kind: str) -> ChatPrompt:
    return film()[0] if kind == "video with sound" else {**CHATS, **PICTURE_CHATS}[kind]


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """The chat as an OpenAI client would send it; sound as float WAV and images as PNG, which lose nothing."""
    from PIL import Image

    out = []
    for message in prompt.messages:
        parts: list[dict[str, Any]] = []
        for part in message.content:
            buffer = io.BytesIO()
            if not hasattr(part, "index"):
                parts.append({"type": "text", "text": part.text})
            elif part.kind == "audio":
                soundfile.write(buffer, prompt.clips[part.index].samples, RATE, format="WAV", subtype="FLOAT")
                data = base64.b64encode(buffer.getvalue()).decode()
                parts.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
            elif part.kind == "video":
                url = f"data:video/mp4;base64,{base64.b64encode(film()[1]).decode()}"
                parts.append({"type": "video_url", "video_url": {"url": url}})
            else:
                Image.fromarray(prompt.images[part.index].pixels).save(buffer, format="PNG")
                url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
                parts.append({"type": "image_url", "image_url": {"url": url}})
        out.append({"role": message.role, "content": parts})
    return out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from omni_ray.models.qwen3_omni.checkpoint import make_tiny

    out = tmp_path_factory.mktemp("served") / "tiny"
    make_tiny(out)
    return out


@pytest.fixture(scope="module")
def references(tiny: Path) -> dict[str, Reference]:
    return make_references(tiny, KINDS, FRAMES)


@torch.inference_mode()
def make_references(tiny: Path, kinds: Sequence[str], frames: int) -> dict[str, Reference]:
    from test_thinker_parity import loaded, prefill, upstream_inputs
    from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

    torch.set_num_threads(2)
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tiny, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    thinker = loaded(tiny)
    seen: list[Any] = []
    decode = model.code2wav.chunked_decode
    model.code2wav.chunked_decode = lambda codes, **more: (seen.append(codes), decode(codes, **more))[1]
    # upstream cannot place sound beside an image in the talker without this: its talker config lacks the field
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    found = {}
    for kind in kinds:
        prompt = chat_of(kind)
        inputs = upstream_inputs(tiny, prompt, prefill(thinker, prompt, 0)[2][0].token_ids)
        thinker.release(0)
        sequences, _ = model.generate(
            **inputs,
            talker_use_audio_in_video=inputs.get("use_audio_in_video", False),
            speaker="ethan",
            return_audio=True,
            thinker_max_new_tokens=TEXT_TOKENS,
            thinker_eos_token_id=model.config.im_end_token_id,
            thinker_do_sample=False,
            talker_do_sample=False,
            talker_max_new_tokens=frames + 1,
        )
        answer = sequences[0, inputs["input_ids"].shape[1] :]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        samples = model.code2wav(seen[-1])[0, 0].numpy()
        found[kind] = Reference(text, samples, messages_of(prompt))
    return found


def config(tiny: Path, talkers: int, frames: int = FRAMES, **talker: Any) -> dict[str, Any]:
    small = {"max_num_seqs": 17, "max_model_len": 600, "threads": 1}
    return {
        "model": str(tiny),
        "stages": {
            "thinker": {"engine": {**small, "dtype": "float32"}, "sampling": {"max_tokens": TEXT_TOKENS}},
            "talker": {
                "deployment": {"num_replicas": talkers, "health_check_period_s": 60} if talkers > 1 else {},
                "engine": {**small, "dtype": "float32", **talker},
                "sampling": {"temperature": 0, "repetition_penalty": 1.05, "max_tokens": frames},
            },
        },
    }


TOGETHER = {"colocate": ["thinker", "talker", "code2wav"]}
"""One process, which starts in half the time of three: where the processes are not what is tested."""


def body(messages: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": "qwen3_omni",
        "messages": messages,
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "stream": True,
        "temperature": 0,
        "mm_processor_kwargs": {"use_audio_in_video": True},
        **more,
    }


def check(reference: Reference, pcm: bytes, text: str) -> None:
    """Text equal; every sample there, once, and within rounding of upstream's."""
    assert text == reference.text
    got = np.frombuffer(pcm, "<i2").astype(np.float64) / 32767
    assert len(got) == len(reference.samples)
    tolerance = 1e-5 * np.abs(reference.samples).max() + 0.51 / 32767
    assert np.abs(got - reference.samples).max() <= tolerance


async def check_usage(client: Any, reference: Reference) -> None:
    """C56: text and audio tokens are counted, streamed or not; text alone starts no talker."""
    for modalities, audio_tokens in ((["text", "audio"], FRAMES), (["text"], 0)):
        asked = body(reference.messages, modalities=modalities, stream_options={"include_usage": True})
        chunks = parse_sse((await client.post("/v1/chat/completions", json=asked)).text)
        assert heard(chunks)[1] == reference.text
        del asked["stream_options"]
        whole = (await client.post("/v1/chat/completions", json={**asked, "stream": False})).json()
        assert chunks[-1]["choices"] == []
        for usage in (chunks[-1]["usage"], whole["usage"]):
            details = usage["completion_tokens_details"]
            assert (details["audio_tokens"], usage["completion_tokens"]) == (audio_tokens, TEXT_TOKENS + audio_tokens)
            assert usage["prompt_tokens"] > 0


async def test_streams_equal_upstream(serving: Serving, tiny: Path, references: dict[str, Reference]) -> None:
    """Text, several turns, sound and image: alone and all at once, streamed and not, greedy text, codes, waveform.

    Beside them clients leave, which nobody hears (C11). Alone one talker says what the other would; that a whole crowd
    has one talker is tested with ``colocate``.
    """
    app: Served = serving("qwen3_omni", config(tiny, 2))

    async def ask(client: Any, kind: str, stream: bool) -> None:
        reference = references[kind]
        response = await client.post("/v1/chat/completions", json=body(reference.messages, stream=stream))
        assert response.status_code == 200, response.text
        if stream:
            check(reference, *heard(parse_sse(response.text)))
            return
        message = response.json()["choices"][0]["message"]
        check(reference, base64.b64decode(message["audio"]["data"]), message["content"])

    async def leave(client: Any, kind: str, after_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await ask(client, kind, True)

    async with app.async_client(timeout=120) as client:
        for kind in KINDS:
            await ask(client, kind, True)
        leavers = [leave(client, kind, 0.3 * n) for n, kind in enumerate(KINDS)]
        await asyncio.gather(*(ask(client, kind, stream) for kind in KINDS for stream in (True, False)), *leavers)
        voices = (await client.get("/v1/audio/voices")).json()
        assert sorted(voices["voices"]) == ["chelsie", "ethan"]
        await check_usage(client, references["text"])
        unknown = await client.post(
            "/v1/chat/completions", json=body(references["text"].messages, audio={"voice": "nobody", "format": "pcm16"})
        )
        assert unknown.status_code == 400
    await asyncio.to_thread(wait_until, lambda: not any(app.ongoing().values()))


async def test_short_and_ended_answers(serving: Serving, tiny: Path, references: dict[str, Reference]) -> None:
    """C52, C57, C23: one token, two tokens, a cut talker; one finish reason after everything, one end."""
    app = serving("qwen3_omni", config(tiny, 2))
    async with app.async_client(timeout=120) as client:
        for tokens in (1, 2, 5):
            response = await client.post(
                "/v1/chat/completions", json=body(references["text"].messages, max_tokens=tokens)
            )
            chunks = parse_sse(response.text)
            reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]]
            assert reasons == ["length"]
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            assert references["text"].text.startswith(heard(chunks)[1])
        zero = await client.post("/v1/chat/completions", json=body(references["text"].messages, max_tokens=0))
        assert zero.status_code == 400


async def test_whole_inputs_give_the_same_samples(serving: Serving, tiny: Path) -> None:
    """``async_chunk: false``: the talker waits for all text, and says the same."""
    whole = {**config(tiny, 1), **TOGETHER, "async_chunk": False}
    assert await said(serving, config(tiny, 2)) == await said(serving, whole)


async def said(serving: Serving, config: dict[str, Any]) -> tuple[bytes, str]:
    """Sound and text of one chat."""
    async with serving("qwen3_omni", config).async_client(timeout=120) as client:
        messages = messages_of(CHATS["text"])
        return heard(parse_sse((await client.post("/v1/chat/completions", json=body(messages))).text))


async def test_one_process_gives_the_same_samples(
    serving: Serving, tiny: Path, references: dict[str, Reference]
) -> None:
    """``colocate``: talker and code2wav share a process and its torch: the very bytes alone, upstream's in a crowd."""
    together = {**config(tiny, 1), "colocate": ["talker", "code2wav"]}
    assert await said(serving, config(tiny, 2)) == await said(serving, together)
    async with serving("qwen3_omni", together).async_client(timeout=120) as client:
        asked = (client.post("/v1/chat/completions", json=body(references[kind].messages)) for kind in KINDS)
        for kind, response in zip(KINDS, await asyncio.gather(*asked), strict=True):
            check(references[kind], *heard(parse_sse(response.text)))


async def test_a_killed_talker_under_load(serving: Serving, tiny: Path, references: dict[str, Reference]) -> None:
    """Two talkers, not deterministic; one dies. Its requests go on in the other one, and every answer is right.

    Nothing may follow on this application: Serve looks for dead replicas too seldom to start another talker.
    """
    app = serving("qwen3_omni", config(tiny, 2))
    reference = references["text"]

    async def ask(client: Any) -> None:
        response = await client.post("/v1/chat/completions", json=body(reference.messages))
        check(reference, *heard(parse_sse(response.text)))

    async with app.async_client(timeout=120) as client:
        running = [asyncio.create_task(ask(client)) for _ in range(8)]
        await asyncio.to_thread(wait_until, lambda: sum(s.ongoing for s in app.states("talker")) > 3)
        os.kill(app.pids("talker")[0], signal.SIGKILL)
        await asyncio.gather(*running)
        await ask(client)


async def test_more_than_300_frames(serving: Serving, tiny: Path) -> None:
    """Upstream's own ``chunked_decode`` loses samples beyond 300 frames; ours equals one call."""
    frames = 304
    app = serving("qwen3_omni", {**config(tiny, 1, frames, base_frames=400), **TOGETHER})
    async with app.async_client(timeout=120) as client:
        asked = client.post("/v1/chat/completions", json=body(messages_of(CHATS["text"])))
        made = asyncio.to_thread(make_references, tiny, ("text",), frames)
        response, references = await asyncio.gather(asked, made)
    assert len(references["text"].samples) == 1920 * frames - 555
    check(references["text"], *heard(parse_sse(response.text)))


async def test_a_seed_gives_the_same_bytes_alone_and_in_a_crowd(serving: Serving, tiny: Path) -> None:
    """Deterministic mode (C38): a sampled, seeded answer is the same among 16 others as alone; another seed differs."""
    deploy = config(tiny, 1)
    for stage in ("thinker", "talker"):
        deploy["stages"][stage]["engine"]["deterministic"] = True
    deploy["stages"]["code2wav"] = {"engine": {"deterministic": True, "max_num_seqs": 17}}
    deploy["stages"]["talker"]["sampling"] = {"temperature": 0.9, "top_k": 50, "max_tokens": 12}
    app = serving("qwen3_omni", {**deploy, **TOGETHER})

    async def ask(client: Any, text: str, seed: int) -> tuple[bytes, str]:
        asked = body([{"role": "user", "content": text}], seed=seed, temperature=1.0, max_tokens=6)
        response = await client.post("/v1/chat/completions", json=asked)
        assert response.status_code == 200, response.text
        return heard(parse_sse(response.text))

    async with app.async_client(timeout=200) as client:
        alone = await ask(client, "Hello, how are you today?", 7)
        crowd = [ask(client, f"Tell me about {k} " + "words " * k, k) for k in range(100, 116)]
        among, *_ = await asyncio.gather(ask(client, "Hello, how are you today?", 7), *crowd)
        assert among == alone
        assert alone[0]
        assert await ask(client, "Hello, how are you today?", 8) != alone


LONG_FRAMES = 60
LONG_ANSWER = body([{"role": "user", "content": "Hello, how are you today?"}], seed=11, temperature=1.0, max_tokens=60)


@pytest.fixture(scope="module")
def exact(tiny: Path) -> dict[str, Any]:
    """Deterministic engines, sampled; long enough to be killed in mid-stream."""
    deploy = config(tiny, 1, LONG_FRAMES, base_frames=200, deterministic=True)
    deploy["stages"]["thinker"]["engine"]["deterministic"] = True
    deploy["stages"]["code2wav"] = {"engine": {"deterministic": True, "max_num_seqs": 17, "chunk_frames": [4]}}
    for stage in deploy["stages"].values():
        stage["deployment"] = SOON
    deploy["stages"]["talker"]["sampling"] = {"temperature": 0.9, "top_k": 50, "max_tokens": LONG_FRAMES}
    return deploy


@pytest.fixture(scope="module")
def undisturbed(serving: Serving, exact: dict[str, Any]) -> tuple[bytes, str]:
    with serving("qwen3_omni", exact).client(timeout=200) as client:
        expected = heard(parse_sse(client.post("/v1/chat/completions", json=LONG_ANSWER).text))
    assert len(expected[0]) == 2 * (LONG_FRAMES * 1920 - 555)
    return expected


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
async def test_a_stream_outlives_a_stage(
    serving: Serving, exact: dict[str, Any], undisturbed: tuple[bytes, str], stage: str
) -> None:
    """kill -9 in mid-stream: the sampled, seeded answer has the bytes and the words of an undisturbed one."""
    app = serving("qwen3_omni", exact)
    async with app.async_client(timeout=200) as client:
        received, killed = "", False
        async with client.stream("POST", "/v1/chat/completions", json=LONG_ANSWER) as response:
            async for text in response.aiter_text():
                received += text
                if not killed and received.count('"data"') >= 3:
                    killed = True
                    for pid in app.pids(stage):
                        os.kill(pid, signal.SIGKILL)
        assert killed
        assert "[DONE]" in received
        assert heard(parse_sse(received)) == undisturbed
