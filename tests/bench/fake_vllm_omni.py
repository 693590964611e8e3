"""A server that speaks vLLM-Omni's chat dialect at a known pace, for the client's parser and for ``bench compare``.

python fake_vllm_omni.py PORT CHUNKS CHUNK_S GAP_S [--stubborn]

Shapes: a top-level ``modality`` in every chunk; text in ``delta.content``; sound as base64 in ``delta.content`` too,
one complete WAV file per chunk, with ``audio_metadata`` beside it and a usage of zero; other keys as OpenAI has them.
``--stubborn`` ignores SIGTERM and leaves a child in a session of its own.
"""

import asyncio
import base64
import contextlib
import io
import json
import signal
import subprocess
import sys
import wave
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

RATE = 24000
WORDS = ["Sounds", " like", " this."]


def wav(seconds: float) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        out.writeframes(b"\1\0" * round(seconds * RATE))
    return file.getvalue()


def sse(modality: str, delta: dict[str, Any], **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": None, **more.pop("choice", {})}
    return b"data: " + json.dumps({"modality": modality, "choices": [choice], **more}).encode() + b"\n\n"


def make_app(chunks: int, chunk_s: float, gap_s: float) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "fake-omni"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> StreamingResponse:
        wanted = await request.json()

        async def body() -> AsyncIterator[bytes]:
            yield sse("text", {"role": "assistant", "content": ""})
            for n, word in enumerate(WORDS, 1):
                yield sse("text", {"content": word}, usage={"completion_tokens": n, "total_tokens": n})
            for _ in range(chunks if "audio" in wanted["modalities"] else 0):
                await asyncio.sleep(gap_s)
                sound = base64.b64encode(wav(chunk_s)).decode()
                metadata = {"format": "wav", "sample_rate_hz": RATE, "frame_count": round(chunk_s * RATE)}
                yield sse(
                    "audio", {"content": sound}, choice={"audio_metadata": metadata}, usage={"completion_tokens": 0}
                )
            yield b"data: [DONE]\n\n"

        return StreamingResponse(body(), media_type="text/event-stream")

    return app


def main() -> None:
    port, chunks, chunk_s, gap_s, *flags = sys.argv[1:]
    server = uvicorn.Server(
        uvicorn.Config(make_app(int(chunks), float(chunk_s), float(gap_s)), port=int(port), log_level="error")
    )
    if "--stubborn" in flags:
        subprocess.Popen(["sleep", "1234"], start_new_session=True)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server.run()


if __name__ == "__main__":
    main()
