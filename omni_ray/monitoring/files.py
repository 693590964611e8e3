"""``omni-ray dashboards``: the dashboard, the alert rules and settings for Prometheus and Grafana, as files."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import yaml

from omni_ray.errors import ConfigError
from omni_ray.monitoring.alerts import prometheus_rule, rules
from omni_ray.monitoring.dashboard import TITLE, dashboard

DISCOVERY: Final = "/tmp/ray/prom_metrics_service_discovery.json"
"""Where a Ray head node keeps the metrics addresses of its cluster up to date."""
_MADE: Final = "# made by `omni-ray dashboards`; change omni_ray/monitoring/ instead\n"


def write_files(out: Path, discovery: str = DISCOVERY, port: int = 9090) -> list[Path]:
    """Write everything below ``out``; what was written.

    Raises:
        ConfigError: a file cannot be written.
    """
    grafana = out / "grafana/provisioning"
    texts = {
        out / "prometheus.yml": _yaml(_prometheus(discovery)),
        out / "rules.yml": _yaml(rules()),
        out / "prometheusrule.yaml": rule_resource(),
        out / "dashboard.json": dashboard_json(),
        grafana / "datasources/omni_ray.yml": _yaml(_datasource(port)),
        grafana / "dashboards/omni_ray.yml": _yaml(_provider(out)),
    }
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be written: {error.strerror}"]) from error
    return list(texts)


def dashboard_json() -> str:
    """The dashboard as a file that Grafana imports."""
    return json.dumps(dashboard(), indent=1) + "\n"


def rule_resource() -> str:
    """The alert rules for the Prometheus Operator."""
    return _yaml(prometheus_rule())


def run_prometheus(out: Path, binary: str, port: int) -> int:
    """Run Prometheus on the written files until it ends or is interrupted; its exit code.

    Raises:
        ConfigError: it is not installed.
    """
    found = shutil.which(binary)
    if found is None:
        raise ConfigError([f"{binary} is not installed; on Debian: apt-get install prometheus"])
    command = [
        found,
        f"--config.file={out / 'prometheus.yml'}",
        f"--storage.tsdb.path={out / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    print(f"Prometheus: http://127.0.0.1:{port}  (Ctrl-C stops it)", flush=True)
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            return process.wait()  # the terminal interrupts it too


def _yaml(content: dict[str, Any]) -> str:
    return _MADE + yaml.safe_dump(content, sort_keys=False, width=10**6)


def _prometheus(discovery: str) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": [{"files": [discovery], "refresh_interval": "5s"}]}],
    }


def _datasource(port: int) -> dict[str, Any]:
    source = {"name": "omni_ray", "type": "prometheus", "access": "proxy", "url": f"http://127.0.0.1:{port}"}
    return {"apiVersion": 1, "datasources": [{**source, "isDefault": True}]}


def _provider(out: Path) -> dict[str, Any]:
    options = {"path": str(out.resolve() / "dashboard.json")}
    return {"apiVersion": 1, "providers": [{"name": TITLE, "type": "file", "options": options}]}
