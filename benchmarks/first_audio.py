"""How soon ``voice_chat`` speaks: starts ``omni-ray serve voice_chat``, asks, and writes first_audio.md.

python benchmarks/first_audio.py
"""

import argparse
import base64
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from omni_ray.serve.ports import free_port

HERE = Path(__file__).parent
QUESTION = "What is the capital of France?"


def ask(client: httpx.Client, content: Any) -> dict[str, float]:
    """Seconds to the first text, the first sound and the end; seconds of sound."""
    body = {
        "model": "voice_chat",
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "pcm16"},
        "stream": True,
    }
    started, seen = time.monotonic(), {"audio_s": 0.0}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                if choice["delta"].get("content"):
                    seen.setdefault("first_text_s", time.monotonic() - started)
                if data := (choice["delta"].get("audio") or {}).get("data"):
                    seen.setdefault("first_audio_s", time.monotonic() - started)
                    seen["audio_s"] += len(base64.b64decode(data)) / 48000
    seen["total_s"] = time.monotonic() - started
    return seen


def memory_mib(root: psutil.Process) -> tuple[float, float]:
    """Resident MiB of the server and all its processes: shared pages counted once (PSS), and counted in each (RSS)."""
    pss = rss = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            info = process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        pss, rss = pss + info.pss, rss + info.rss
    return pss / 2**20, rss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--deploy-config", help="a deploy config to compare with the default one")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "omni_ray.cli", "serve", "voice_chat", "--port", str(port)]
    if args.deploy_config:
        command.append(f"deploy_config={args.deploy_config}")
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        while True:
            try:
                if client.get("/ready").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        ready_s = time.monotonic() - started
        first = ask(client, QUESTION)
        time.sleep(5)
        body = {"model": "voice_chat", "input": QUESTION, "voice": "alloy", "response_format": "wav"}
        clip = base64.b64encode(client.post("/v1/audio/speech", json=body).content).decode()
        spoken = [{"type": "input_audio", "input_audio": {"data": clip, "format": "wav"}}]
        rows = {}
        for name, content in {"text question": QUESTION, "spoken question": spoken}.items():
            answers = []
            for k in range(args.repeats):
                print(f"{name} {k + 1}/{args.repeats}", file=sys.stderr, end="\r", flush=True)
                answers.append(ask(client, content))
                time.sleep(0.5)
            rows[name] = answers
        pss, rss = memory_mib(psutil.Process(process.pid))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    lines = [
        "# How soon voice_chat speaks",
        "",
        "`python benchmarks/first_audio.py` wrote this file. Client and server share the cores.",
        "",
        f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}, load average "
        f"{os.getloadavg()[0]:.1f} at the end; {args.repeats} questions each, one at a time: {QUESTION!r}",
        "",
        "| question | first text s, median (worst) | first audio s, median (worst) | whole answer s | audio s |",
        "|---|---|---|---|---|",
    ]
    for name, answers in rows.items():
        cells = []
        for key in ("first_text_s", "first_audio_s"):
            values = [a[key] for a in answers]
            cells.append(f"{statistics.median(values):.2f} ({max(values):.2f})")
        whole = statistics.median(a["total_s"] for a in answers)
        lines.append(f"| {name} | {' | '.join(cells)} | {whole:.2f} | {answers[0]['audio_s']:.2f} |")
    lines += [
        "",
        f"From the command to the first 200 of `/ready`: {ready_s:.1f} s. The very first answer began to sound after "
        f"{first['first_audio_s']:.2f} s. Resident memory of everything, Ray and its dashboard included: {pss:.0f} MiB "
        f"with shared pages counted once, {rss:.0f} MiB counted in every process.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if not args.dry:
        (HERE / "first_audio.md").write_text(text)


if __name__ == "__main__":
    main()
