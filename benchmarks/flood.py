"""What a flood of batch speech does to chat: time to first sound alone, in a flood, and without our order of work.

python benchmarks/flood.py

Serves ``ramp`` on a Ray cluster of its own; its codec decodes 1,000 frames (80 s of sound) a second, in one thread.
Every answer is compared with the oracle. Writes flood.md.
"""

import argparse
import asyncio
import base64
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

from omni_ray.models.ramp import oracle
from omni_ray.serve.builder import build_application
from omni_ray.serve.ports import free_port
from omni_ray.serve.resolve import AppArgs

HERE = Path(__file__).parent
CHAT_TEXT = "one two three four"
FLOOD_TEXT = " ".join(["word"] * 60)
CODEC = {"max_num_seqs": 32, "frame_ms": 1, "step_ms": 30}
TALKER = {"max_num_seqs": 16, "faults": {"delay_ms": 8}}


def config(ordered: bool) -> dict[str, Any]:
    """``ordered`` false: no reserved places and steps as long as may be, so that nothing is left to order."""
    off = {} if ordered else {"reserved_seqs": 0}
    return {
        "stages": {
            "thinker": {"engine": {"faults": {"delay_ms": 10}}},
            "talker": {"engine": {**TALKER, **off}},
            "code2wav": {"engine": {**CODEC, **off, **({} if ordered else {"step_ms": 1e9})}},
        },
        "ingress": {"grace_s": 2},
    }


async def first_sound_s(client: httpx.AsyncClient) -> float:
    """Seconds until a chat speaks; infinite if it is refused."""
    body = {
        "model": "ramp",
        "messages": [{"role": "user", "content": CHAT_TEXT}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "a", "format": "pcm16"},
        "stream": True,
    }
    started, first, pcm = time.monotonic(), float("inf"), b""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code == 503:
            return first
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if data := (choice["delta"].get("audio") or {}).get("data"):
                        first = min(first, time.monotonic() - started)
                        pcm += base64.b64decode(data)
    assert pcm == oracle.pcm(CHAT_TEXT)
    return first


async def speak(client: httpx.AsyncClient, answered: list[float]) -> None:
    """Ask for a whole file again and again."""
    body = {"model": "ramp", "input": FLOOD_TEXT, "voice": "a", "response_format": "pcm", "stream": False}
    expected = oracle.pcm(FLOOD_TEXT)
    while True:
        response = await client.post("/v1/audio/speech", json=body)
        if response.status_code == 503:
            await asyncio.sleep(float(response.headers["retry-after"]))
            continue
        assert response.content == expected
        answered.append(time.monotonic())


async def measure(url: str, chats: int, flooders: int) -> tuple[list[float], list[float], float]:
    """First sound alone, and in a flood; audio seconds that the flood got per second."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await first_sound_s(client)
        alone = [await first_sound_s(client) for _ in range(chats)]
        answered: list[float] = []
        tasks = [asyncio.create_task(speak(client, answered)) for _ in range(flooders)]
        await asyncio.sleep(4)
        began = time.monotonic()
        crowded = [await first_sound_s(client) for _ in range(chats)]
        await asyncio.sleep(max(0.0, 12 - (time.monotonic() - began)))
        share = sum(at > began for at in answered) * len(oracle.pcm(FLOOD_TEXT)) / 48_000 / (time.monotonic() - began)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return alone, crowded, share


def row(name: str, values: list[float]) -> str:
    """A line of the table."""
    return f"| {name} | {statistics.median(values) * 1000:.0f} | {max(values) * 1000:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=15)
    parser.add_argument("--flooders", type=int, default=30)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    port = free_port()
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="error")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    lines, ratios = [], []
    try:
        for ordered in (True, False):
            app = build_application("ramp", AppArgs(deploy_config=config(ordered)))
            serve.run(app, name="flood", route_prefix="/flood")
            url = f"http://127.0.0.1:{port}/flood"
            while httpx.get(f"{url}/ready").status_code != 200:
                time.sleep(0.1)
            alone, crowded, share = asyncio.run(measure(url, args.chats, args.flooders))
            serve.delete("flood")
            name = "as shipped" if ordered else "no reserved places, no bound on a step"
            ratios.append((name, statistics.median(crowded) / statistics.median(alone), share))
            lines += [row(f"{name}: alone", alone), row(f"{name}: in the flood", crowded)]
    finally:
        serve.shutdown()
        ray.shutdown()
    text = "\n".join(
        [
            "# What a flood of batch speech does to chat",
            "",
            "`python benchmarks/flood.py` wrote this file. Client and server share the cores.",
            "",
            f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}, load average "
            f"{os.getloadavg()[0]:.1f} at the end. `ramp` through Ray Serve, one replica per stage: 16 places in the "
            f"talker, 32 in the codec, which decodes 80 s of sound a second. {args.flooders} clients ask for whole "
            f"files of 14.4 s again and again; meanwhile {args.chats} chats, one after the other.",
            "",
            "| chat's first sound | median ms | worst ms |",
            "|---|---|---|",
            *lines,
            "",
            *(
                f"{name[0].upper()}{name[1:]}: {ratio:.1f} times as long in the flood, which got {share:.0f} s of "
                "sound a second."
                for name, ratio, share in ratios
            ),
            "",
        ]
    )
    print(text)
    if not args.dry:
        (HERE / "flood.md").write_text(text)


if __name__ == "__main__":
    main()
