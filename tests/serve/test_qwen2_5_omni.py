"""``qwen2_5_omni`` on the tiny checkpoint, through real Ray Serve over HTTP: upstream's text, codes and sound."""

import asyncio
import base64
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from omni_ray.models.qwen2_5_omni.checkpoint import make_tiny
from tests.conftest import Served, Serving, wait_until
from tests.serve.crowd import heard, parse_sse

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "qwen2_5_omni"))
from qwen25_upstream import CHATS, RATE, TOKENS, monolith, padded, upstream_inputs

FRAMES, SEED = 30, 11
KINDS = ("text", "audio", "image")


@dataclass
class Reference:
    """What upstream says in one piece, and the chat as an OpenAI client sends it."""

    text: str
    samples: NDArray[np.float32]
    messages: list[dict[str, Any]]


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """Sound as float WAV and images as PNG, which lose nothing."""
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
            else:
                Image.fromarray(prompt.images[part.index].pixels).save(buffer, format="PNG")
                url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
                parts.append({"type": "image_url", "image_url": {"url": url}})
        out.append({"role": message.role, "content": parts})
    return out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("served") / "qwen25"
    make_tiny(out)
    return out


@pytest.fixture(scope="module")
def references(tiny: Path) -> dict[str, Reference]:
    from transformers import AutoTokenizer, Qwen2_5OmniForConditionalGeneration

    from omni_ray.models.qwen2_5_omni.media import MediaReader
    from omni_ray.models.qwen2_5_omni.prompt import CHAT_TEMPLATE
    from omni_ray.models.qwen2_5_omni.thinker_prompt import PromptMaker

    model = Qwen2_5OmniForConditionalGeneration.from_pretrained(tiny, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    maker = PromptMaker(tokenizer, CHAT_TEMPLATE, model.config.thinker_config, MediaReader(tiny), 600)
    found = {}
    for kind in KINDS:
        ids = tuple(maker.make(CHATS[kind]).ids)
        text, _, samples = monolith(model, padded(upstream_inputs(tiny, CHATS[kind], ids)), FRAMES, SEED)
        found[kind] = Reference(tokenizer.decode(text), samples, messages_of(CHATS[kind]))
    return found


@pytest.fixture(scope="module")
def app(serving: Serving, tiny: Path) -> Served:
    engine = {"max_num_seqs": 8, "max_model_len": 600, "threads": 1, "dtype": "float32", "deterministic": True}
    stages = {
        "thinker": {"engine": engine, "sampling": {"max_tokens": TOKENS}},
        "talker": {"engine": engine, "sampling": {"temperature": 0, "max_tokens": FRAMES}},
    }
    return serving("qwen2_5_omni", {"model": str(tiny), "stages": stages})


def body(messages: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": "qwen2_5_omni",
        "messages": messages,
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "stream": True,
        "temperature": 0,
        "seed": SEED,
        **more,
    }


async def test_answers_equal_upstream(app: Served, references: dict[str, Reference]) -> None:
    """Text, sound and image: all at once, streamed and not, greedy text and codes, the sound of the same noise."""

    async def ask(client: Any, kind: str, stream: bool) -> None:
        reference = references[kind]
        response = await client.post("/v1/chat/completions", json=body(reference.messages, stream=stream))
        assert response.status_code == 200, response.text
        if stream:
            pcm, text = heard(parse_sse(response.text))
        else:
            message = response.json()["choices"][0]["message"]
            pcm, text = base64.b64decode(message["audio"]["data"]), message["content"]
        assert text == reference.text
        got = np.frombuffer(pcm, "<i2").astype(np.float64) / 32767
        assert len(got) == len(reference.samples) == 480 * FRAMES
        assert np.abs(got - reference.samples).max() <= 1e-5 + 0.51 / 32767

    async with app.async_client(timeout=120) as client:
        await asyncio.gather(*(ask(client, kind, stream) for kind in KINDS for stream in (True, False)))
        assert (await client.get("/v1/audio/voices")).json()["voices"] == ["Chelsie", "Ethan"]
        messages = references["text"].messages
        whole = await client.post("/v1/chat/completions", json=body(messages, modalities=["text"], stream=False))
        assert whole.json()["choices"][0]["message"]["content"] == references["text"].text
        assert whole.json()["usage"]["completion_tokens"] == TOKENS
        short = await client.post("/v1/chat/completions", json=body(messages, max_tokens=1))
        assert not any(heard(parse_sse(short.text))[0]), "one token is never spoken"
        unknown = body(messages, audio={"voice": "nobody", "format": "pcm16"})
        assert (await client.post("/v1/chat/completions", json=unknown)).status_code == 400
        # Hanging up frees all stages.
        async with client.stream("POST", "/v1/chat/completions", json=body(messages)) as response:
            await anext(response.aiter_text())
    await asyncio.to_thread(wait_until, lambda: not any(app.ongoing().values()), 20)
