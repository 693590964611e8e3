"""Asking for speech in the voice of a recording, and what holds for everybody who asks at once."""

import asyncio
import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from tests.conftest import Served, Serving

TEXT = "The past is just a story we tell ourselves."


def recording(seconds: float = 0.5, rate: int = 16_000) -> str:
    """A tone, as a WAV file in base64."""
    buffer = io.BytesIO()
    tone = np.sin(np.arange(int(rate * seconds)) * 0.05).astype(np.float32) / 2
    soundfile.write(buffer, tone, rate, format="WAV")
    return base64.b64encode(buffer.getvalue()).decode()


def deterministic_app(
    serving: Serving, name: str, make_tiny: Callable[[Path], None], out: Path, frames: int, **more: Any
) -> Served:
    """A pipeline of talker and code2wav on its tiny checkpoint; answers end after ``frames``."""
    make_tiny(out)
    talker = {
        "engine": {"deterministic": True, "threads": 1, "max_model_len": 512},
        "sampling": {"max_tokens": frames},
    }
    code2wav = {"engine": {"deterministic": True}}
    return serving(name, {"model": str(out), "stages": {"talker": talker, "code2wav": code2wav}, **more})


def speech(model: str, text: str = TEXT, **more: Any) -> dict[str, Any]:
    """In one piece: random weights do not end by themselves, and a raw stream that is cut off is aborted."""
    return {"model": model, "input": text, "response_format": "pcm", "seed": 5, "stream": False, **more}


async def same_alone_and_at_once(app: Served, bodies: Sequence[dict[str, Any]], headers: dict[str, str]) -> list[bytes]:
    """What is answered to each body alone: different sounds, and byte for byte the same when all ask at once."""
    async with app.async_client() as client:

        async def ask(body: dict[str, Any]) -> bytes:
            response = await client.post("/v1/audio/speech", json=body)
            assert response.status_code == 200, response.text
            assert {name: response.headers.get(name) for name in headers} == headers
            return response.content

        alone = [await ask(body) for body in bodies]
        assert await asyncio.gather(*map(ask, bodies)) == alone
    assert len(set(alone)) == len(bodies)
    return alone
