"""Metrics end to end: load on ``ramp``, then what Ray's own Prometheus endpoint says."""

import asyncio
import re
import time
from collections import defaultdict
from typing import Any

import httpx
import pytest

from omni_ray.monitoring.metrics import COMMON, IMAGE_TOKENS, IMAGES, METRICS, REQUESTS_RETRIED, Metric
from tests.conftest import PATIENCE_S, SOON, Served, Serving

CONFIG: dict[str, Any] = {
    "stages": {
        "thinker": {"engine": {"latent_width": 40_000}},
        "code2wav": {
            "engine": {
                "chunk_frames": [3], "max_num_seqs": 1, "max_queue": 1, "allow_request_faults": True,
            },
            "deployment": SOON,
        },
    },
    "ingress": {"max_concurrent_requests": 8},
}  # fmt: skip
CHUNK_S = 0.24
LINE = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Sample = tuple[dict[str, str], float]


def scrape() -> dict[str, list[Sample]]:
    """Every sample of every live node's endpoint, by series name."""
    import ray

    samples: dict[str, list[Sample]] = defaultdict(list)
    for node in filter(lambda node: node["Alive"], ray.nodes()):
        endpoint = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        text = httpx.get(endpoint, timeout=PATIENCE_S).text
        for line in text.splitlines():
            if match := LINE.match(line):
                samples[match[1]].append((dict(LABEL.findall(match[2])), float(match[3])))
    return samples


def of(samples: dict[str, list[Sample]], app: Served, metric: Metric, series: str = "", **labels: str) -> list[Sample]:
    wanted = {"application": app.name, **labels}
    return [s for s in samples[metric.exported + series] if wanted.items() <= s[0].items()]


def total(samples: dict[str, list[Sample]], app: Served, name: str, series: str = "", **labels: str) -> float:
    metric = next(m for m in METRICS if m.name == name)
    return sum(value for _, value in of(samples, app, metric, series, **labels))


async def scraped_when(
    app: Served, wanted: dict[str, tuple[dict[str, str], float]], seconds: float = 200
) -> dict[str, list[Sample]]:
    """Ray's endpoint is some seconds behind: wait until each metric, with its labels, sums up to the value."""
    deadline = time.monotonic() + seconds
    while True:
        samples = scrape()
        got = {name: (labels, total(samples, app, name, **labels)) for name, (labels, _) in wanted.items()}
        if got == wanted:
            return samples
        assert time.monotonic() < deadline, (got, wanted)
        await asyncio.sleep(1)


def chat(words: int, **faults: Any) -> dict[str, Any]:
    return {
        "model": "ramp", "messages": [{"role": "user", "content": " ".join(["w"] * words)}], "stream": True,
        "modalities": ["text", "audio"], "audio": {"voice": "a", "format": "pcm16"}, "ramp": {"code2wav": faults},
    }  # fmt: skip


async def test_every_metric_has_data_and_says_what_happened(serving: Serving) -> None:
    """Two smooth chats, one slow one with a known gap, one that fails, one refused, one cut off, one invalid."""
    app = serving("ramp", CONFIG)
    route = "/v1/chat/completions"
    async with app.async_client() as client:
        for _ in range(2):
            assert (await client.post(route, json=chat(4))).status_code == 200
        await client.post(route, json=chat(5, delay_ms=400))  # 4 x 0.16 s of underrun
        assert "error" in (await client.post(route, json=chat(4, fail_at=1))).text
        assert (await client.post(route, json={"model": "ramp"})).status_code == 400
        async with client.stream("POST", route, json=chat(40, delay_ms=100)) as response:
            lines = response.aiter_lines()
            await anext(lines)
            slow = [asyncio.create_task(client.post(route, json=chat(1, delay_ms=50))) for _ in range(3)]
            done = await asyncio.gather(*slow)
            assert sorted(r.status_code for r in done)[-1] == 503
            assert [line async for line in lines][-2:] == ["data: [DONE]", ""]
        async with client.stream("POST", route, json=chat(40, delay_ms=100)) as gone:
            await anext(gone.aiter_lines())
        refused = sum(r.status_code == 503 for r in done)
    wanted = {
        "requests": ({"route": route, "outcome": "disconnected"}, 1.0),
        "stage_requests": ({"stage": "code2wav", "outcome": "cancelled"}, 1.0),
        "stage_waiting_requests": ({}, 0.0),
        "stage_running_requests": ({}, 0.0),
        "num_requests_running": ({}, 0.0),
    }
    samples = await scraped_when(app, wanted)
    for metric in METRICS:
        if metric in (REQUESTS_RETRIED, IMAGES, IMAGE_TOKENS):
            continue
        found = of(samples, app, metric, "_count" if metric.kind == "histogram" else "")
        assert found, f"{metric.exported} has no data"
        assert {*COMMON, *metric.labels} <= found[0][0].keys()
    assert total(samples, app, "requests", outcome="refused", route=route) == refused
    assert total(samples, app, "requests", outcome="failed", route=route) == 1
    assert total(samples, app, "requests", outcome="invalid", route=route) == 1
    assert total(samples, app, "stage_requests", stage="code2wav", outcome="failed") == 1
    assert total(samples, app, "stage_requests", stage="code2wav", outcome="refused") == refused
    streams, smooth = (total(samples, app, name) for name in ("audio_streams", "audio_continuity_ok"))
    waited = total(samples, app, "audio_underrun_s", "_count") - total(
        samples, app, "audio_underrun_s", "_bucket", le="0.5"
    )
    assert 1 <= waited <= streams - smooth, "one stream waited 0.64 s, and maybe one that a busy machine held up"
    assert streams - smooth < streams / 2, "more than the slow one, and a few that a busy machine held up"
    assert total(samples, app, "audio_seconds") >= (4 + 4 + 5) * CHUNK_S
    assert total(samples, app, "transfer_bytes", from_stage="thinker", to_stage="talker") >= 13 * 40_000 * 4
    assert total(samples, app, "stage_places", stage="code2wav") == 1
    assert total(samples, app, "stage_ready", of_stage="talker") == 1
    assert total(samples, app, "held_refs") == 0
    async with app.async_client() as client:  # last, because the dead replica takes its numbers with it
        body = {"model": "ramp", "input": "w", "voice": "a", "ramp": {"code2wav": {"kill_at": 0}}}
        assert (await client.post("/v1/audio/speech", json=body, timeout=90)).status_code == 503
    await scraped_when(app, {"requests_retried": ({"kind": "retry"}, 1.0)})


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_metric_is_well_formed(metric: Metric) -> None:
    """Prometheus' rules for names, and ours: the unit in the name, growing buckets, labels that exist."""
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert not metric.name.endswith("_total"), "Ray adds it"
    assert metric.kind != "histogram" or metric.buckets
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert {*metric.by} <= {*COMMON, *metric.labels}
    if metric.unit in ("s", "bytes") and metric.kind != "counter":
        assert metric.name.endswith(f"_{metric.unit}")


def test_names_are_unique() -> None:
    assert len({m.name for m in METRICS}) == len(METRICS)
