"""Alert rules, as data and as what Prometheus reads. Thresholds are first guesses for speech; change them here."""

from dataclasses import dataclass
from typing import Any, Literal

from omni_ray.monitoring import metrics
from omni_ray.monitoring.metrics import Metric


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule: fires when ``expr`` has held for ``minutes``."""

    name: str
    expr: str
    minutes: int
    severity: Literal["warning", "critical"]
    summary: str


def _rate(metric: Metric, by: str, match: str = "") -> str:
    return f"sum by (application, {by}) (rate({metric.exported}{match}[5m]))"


def _p95(metric: Metric, by: str) -> str:
    return f"histogram_quantile(0.95, sum by (application, {by}, le) (rate({metric.exported}_bucket[5m])))"


_FAILED, _REFUSED = '{outcome="failed"}', '{outcome="refused"}'
_ANY_REQUESTS = f"({_rate(metrics.REQUESTS, 'pipeline')} > 0)"

ALERTS = (
    Alert(
        "OmniRayListenersHearGaps",
        f"{_rate(metrics.AUDIO_CONTINUITY_OK, 'pipeline')} / ({_rate(metrics.AUDIO_STREAMS, 'pipeline')} > 0) < 0.95",
        5, "critical", "more than 5 % of the streams of {{ $labels.pipeline }} had a gap in their sound",
    ),
    Alert(
        "OmniRayFirstAudioIsSlow",
        f"{_p95(metrics.AUDIO_TTFP_S, 'pipeline')} > 2",
        10, "warning", "one in twenty listeners of {{ $labels.pipeline }} waits {{ $value | humanizeDuration }}",
    ),
    Alert(
        "OmniRaySlowerThanRealTime",
        f"{_p95(metrics.AUDIO_RTF, 'pipeline')} > 1",
        10, "warning", "one stream in twenty of {{ $labels.pipeline }} is made more slowly than it is played",
    ),
    Alert(
        "OmniRayRequestsFail",
        f"{_rate(metrics.REQUESTS, 'pipeline', _FAILED)} / {_ANY_REQUESTS} > 0.01",
        5, "critical", "{{ $value | humanizePercentage }} of the requests to {{ $labels.pipeline }} fail",
    ),
    Alert(
        "OmniRayRequestsRefused",
        f"{_rate(metrics.REQUESTS, 'pipeline', _REFUSED)} / {_ANY_REQUESTS} > 0.05",
        10, "warning", "{{ $value | humanizePercentage }} of the requests to {{ $labels.pipeline }} are refused: "
        "it is full",
    ),
    Alert(
        "OmniRayStageNotReady",
        f"min by (application, pipeline, of_stage) ({metrics.STAGE_READY.exported}) < 1",
        2, "critical", "stage {{ $labels.of_stage }} of {{ $labels.pipeline }} does not answer",
    ),
    Alert(
        "OmniRayStageQueueGrows",
        f"max by (application, stage) ({metrics.STAGE_OLDEST_WAIT_S.exported}) > 5",
        5, "warning", "a request has waited {{ $value | humanizeDuration }} in stage {{ $labels.stage }}",
    ),
    Alert(
        "OmniRayReplicasDie",
        f"sum by (application, pipeline) (increase({metrics.REQUESTS_RETRIED.exported}[10m])) > 3",
        0, "warning", "replicas of {{ $labels.pipeline }} keep dying under requests",
    ),
    Alert(
        "OmniRayRefsPileUp",
        f"sum by (application, stage) ({metrics.HELD_REF_BYTES.exported}) > 8e9",
        5, "warning", "stage {{ $labels.stage }} holds {{ $value | humanize1024 }}B of latents that nobody has read",
    ),
)  # fmt: skip


def rules() -> dict[str, Any]:
    """The rule file of a plain Prometheus; also the ``spec`` of the operator's PrometheusRule."""
    return {
        "groups": [
            {
                "name": "omni_ray",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expr,
                        "for": f"{alert.minutes}m",
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }


def prometheus_rule() -> dict[str, Any]:
    """The rules as a resource for the Prometheus Operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "omni-ray", "labels": {"release": "prometheus"}},
        "spec": rules(),
    }
