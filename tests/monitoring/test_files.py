"""What is made from the metrics: the committed files are up to date, Prometheus reads them, every panel has data."""

import asyncio
import json
import math
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from omni_ray.cli import main
from omni_ray.monitoring.alerts import ALERTS
from omni_ray.monitoring.dashboard import dashboard, panels
from omni_ray.monitoring.files import dashboard_json, rule_resource
from omni_ray.monitoring.metrics import COMMON, METRICS
from omni_ray.serve.ports import free_port
from tests.conftest import Serving

K8S = Path(__file__).parents[2] / "k8s/components/monitoring"
NAMES = {m.exported for m in METRICS}
SERIES = NAMES | {f"{m.exported}_{part}" for m in METRICS if m.kind == "histogram" for part in ("bucket", "count")}

CONFIG: dict[str, Any] = {
    "stages": {
        "thinker": {"engine": {"latent_width": 40_000}},
        "code2wav": {"engine": {"chunk_frames": [3], "faults": {"delay_ms": 20}}},
    }
}
"""Shared with the demo page's tests: latents as refs, and sound that streams while it plays."""

needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")


def test_committed_files_are_what_the_metrics_say() -> None:
    """Run `omni-ray dashboards OUT` and copy the two files if this fails."""
    assert (K8S / "prometheusrule.yaml").read_text() == rule_resource()
    assert (K8S / "dashboard.json").read_text() == dashboard_json()


def test_every_metric_is_shown_and_every_name_exists() -> None:
    shown = " ".join(expr for _, _, queries in panels() for expr, _ in queries)
    assert {name for name in NAMES if re.search(rf"\b{name}(_bucket)?\b", shown)} == NAMES
    for text in (shown, " ".join(alert.expr for alert in ALERTS)):
        assert set(re.findall(r"\bray_omni_ray_\w+", text)) <= SERIES
    labels = {*COMMON, "le", *(label for m in METRICS for label in m.labels)}
    for _, metric, queries in panels():
        for expr, legend in queries:
            assert {*re.findall(r"\{\{(\w+)\}\}", legend)} <= {*re.findall(r"by \(([^)]*)\)", expr)[0].split(", ")}
            assert {*metric.by} <= labels


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        box = panel["gridPos"]
        cells = {(box["x"] + i, box["y"] + j) for i in range(box["w"]) for j in range(box["h"])}
        assert not cells & taken
        assert box["x"] + box["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))


def test_command_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboards", str(tmp_path / "out")]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 6
    settings = yaml.safe_load((tmp_path / "out/prometheus.yml").read_text())
    assert settings["rule_files"] == ["rules.yml"]
    rules = yaml.safe_load((tmp_path / "out/rules.yml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in ALERTS]
    assert main(["dashboards", str(tmp_path / "out"), "--run", "--prometheus", "no-such-prometheus"]) == 2
    assert "apt-get install prometheus" in capsys.readouterr().err


@needs_prometheus
def test_prometheus_accepts_settings_and_rules(tmp_path: Path) -> None:
    assert main(["dashboards", str(tmp_path)]) == 0
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


@needs_prometheus
async def test_every_panel_has_data(serving: Serving, tmp_path: Path) -> None:
    """A real Prometheus on the session's cluster, load on ``ramp``, and every query of the dashboard asked."""
    import ray

    app = serving("ramp", CONFIG)
    discovery = tmp_path / "discovery.json"
    targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]
    discovery.write_text(json.dumps([{"labels": {}, "targets": targets}]))
    port = free_port()
    assert main(["dashboards", str(tmp_path), "--discovery", str(discovery)]) == 0
    binary = shutil.which("prometheus")
    assert binary is not None
    settings = [f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    address = f"--web.listen-address=127.0.0.1:{port}"
    process = await asyncio.create_subprocess_exec(binary, *settings, address, "--log.level=warn")
    try:
        async with app.async_client() as client, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as prometheus:
            deadline, empty = time.monotonic() + 200, ["everything"]
            while empty and time.monotonic() < deadline:
                until = time.monotonic() + 2
                while time.monotonic() < until:
                    body = {
                        "model": "ramp", "messages": [{"role": "user", "content": "one two"}], "stream": True,
                        "modalities": ["text", "audio"], "audio": {"voice": "a", "format": "pcm16"},
                    }  # fmt: skip
                    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
                    await asyncio.sleep(0.3)
                empty = [
                    metric.name
                    for _, metric, queries in panels()
                    for expr, _ in queries
                    if not await has_data(prometheus, expr, app.name)
                ]
        assert not empty
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 20)


async def has_data(prometheus: httpx.AsyncClient, expr: str, application: str) -> bool:
    """As Grafana would ask: the interval filled in, the application chosen."""
    asked = expr.replace("$__rate_interval", "30s").replace("$application", application)
    try:
        answer: dict[str, Any] = (await prometheus.get("/api/v1/query", params={"query": asked})).json()
    except httpx.TransportError:
        return False
    assert answer["status"] == "success", (asked, answer)
    return any(not math.isnan(float(sample["value"][1])) for sample in answer["data"]["result"])
