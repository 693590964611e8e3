"""The Grafana dashboard, made from the metrics: one panel for each, in rows, and the queries behind them."""

from typing import Any

from omni_ray.monitoring import metrics
from omni_ray.monitoring.metrics import METRICS, Metric, Row

TITLE, UID = "omni_ray", "omni-ray"
_SELECT = '{application=~"$application"}'
_UNITS = {"s": "s", "bytes": "bytes", "": "short", "tokens": "short"}
_PER_SECOND = {"s": "none", "bytes": "Bps", "": "ops", "tokens": "none"}
_PANEL_WIDTH, _PANEL_HEIGHT, _PER_ROW = 8, 7, 3
_HIDDEN = (metrics.AUDIO_STREAMS,)
"""Shown inside another panel."""


def panels() -> list[tuple[Row, Metric, list[tuple[str, str]]]]:
    """For each panel: its row, its metric, and its queries with their legends."""
    rows: list[Row] = ["Listeners", "Requests", "Stages", "Edges", "Memory"]
    shown = [metric for metric in METRICS if metric not in _HIDDEN]
    return [(row, metric, _queries(metric)) for row in rows for metric in shown if metric.row == row]


def _queries(metric: Metric) -> list[tuple[str, str]]:
    otherwise = " or vector(0)" if metric.rare else ""
    return [(expr + otherwise, legend) for expr, legend in _asked(metric)]


def _asked(metric: Metric) -> list[tuple[str, str]]:
    name, by = metric.exported, ", ".join(metric.by)
    legend = " -> ".join(f"{{{{{label}}}}}" for label in metric.by)
    if metric is metrics.AUDIO_CONTINUITY_OK:
        of = f"sum by ({by}) (rate({metrics.AUDIO_STREAMS.exported}{_SELECT}[$__rate_interval]))"
        return [(f"sum by ({by}) (rate({name}{_SELECT}[$__rate_interval])) / {of}", legend)]
    if metric.kind == "counter":
        return [(f"sum by ({by}) (rate({name}{_SELECT}[$__rate_interval]))", legend)]
    if metric.kind == "histogram":
        buckets = f"sum by ({by}, le) (rate({name}_bucket{_SELECT}[$__rate_interval]))"
        return [(f"histogram_quantile({q}, {buckets})", f"{legend} p{q * 100:.0f}") for q in (0.5, 0.95)]
    if metric is metrics.STAGE_LEAST_LEAD_S or metric is metrics.STAGE_READY:
        return [(f"min by ({by}) ({name}{_SELECT})", legend)]
    gather = "max" if metric is metrics.STAGE_OLDEST_WAIT_S else "sum"
    return [(f"{gather} by ({by}) ({name}{_SELECT})", legend)]


def _unit(metric: Metric) -> str:
    if metric is metrics.AUDIO_CONTINUITY_OK:
        return "percentunit"
    return (_PER_SECOND if metric.kind == "counter" else _UNITS)[metric.unit]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model; it asks for a Prometheus data source and an application."""
    made: list[dict[str, Any]] = []
    y, column, row = 0, 0, None
    for number, (row_name, metric, queries) in enumerate(panels()):
        if row_name != row:
            y += _PANEL_HEIGHT if column else 0
            made.append({
                "type": "row", "title": row_name, "id": 1000 + y, "collapsed": False, "panels": [],
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            })  # fmt: skip
            row, column, y = row_name, 0, y + 1
        made.append(_panel(number + 1, metric, queries, column * _PANEL_WIDTH, y))
        column += 1
        if column == _PER_ROW:
            column, y = 0, y + _PANEL_HEIGHT
    return {
        "uid": UID,
        "title": TITLE,
        "tags": ["omni_ray", "ray"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_datasource(), _application()]},
        "panels": made,
    }


def _panel(number: int, metric: Metric, queries: list[tuple[str, str]], x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": metric.title,
        "description": f"{metric.exported}: {metric.help}",
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": _PANEL_WIDTH, "h": _PANEL_HEIGHT},
        "fieldConfig": {"defaults": {"unit": _unit(metric), "min": None}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + n), "expr": expr, "legendFormat": legend, "datasource": source}
            for n, (expr, legend) in enumerate(queries)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _application() -> dict[str, Any]:
    query = f"label_values({metrics.STAGE_PLACES.exported}, application)"
    return {
        "name": "application",
        "label": "Application",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": "A"},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }
