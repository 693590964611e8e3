"""A run as JSON and as a table; several runs as one table with ratios."""

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omni_ray import __version__
from omni_ray.bench.answer import Answer
from omni_ray.bench.figures import OF_RUN, PER_REQUEST, PERCENTILES, Figure, Summary, summarise
from omni_ray.bench.load import Run
from omni_ray.bench.workload import Workload


@dataclass(frozen=True, slots=True)
class Measured:
    """One server's run and what it was asked.

    Attributes:
        name: what the table calls the server.
        base_url: where it answered. command: how it was started, None if it ran already.
        started_at: UTC, ISO 8601. ready_s: from its command to its first healthy answer, None if it ran already.
    """

    name: str
    base_url: str
    workload: Workload
    run: Run
    started_at: str
    continuity_threshold_s: float
    command: str | None = None
    ready_s: float | None = None

    def summary(self) -> Summary:
        """The run in figures."""
        return summarise(self.run, self.continuity_threshold_s)

    def as_json(self) -> dict[str, Any]:
        """Everything: figures, and every request."""
        summary = self.summary()
        figures: dict[str, Any] = dict(summary.totals)
        for name, spread in summary.spreads.items():
            figures[name] = {
                "count": spread.count, "mean": spread.mean, **{f"p{p}": v for p, v in spread.percentiles.items()},
            }  # fmt: skip
        return {
            "name": self.name,
            "base_url": self.base_url,
            "model": self.run.model,
            "command": self.command,
            "ready_s": self.ready_s,
            "started_at": self.started_at,
            "client": f"omni_ray {__version__}, Python {platform.python_version()}",
            "workload": self.workload.model_dump(),
            "continuity_threshold_s": self.continuity_threshold_s,
            "figures": figures,
            "errors": {kind: {"count": n, "message": said} for kind, (n, said) in summary.errors.items()},
            "requests": [_request(a) for a in self.run.answers],
            "warmup": [_request(a) for a in self.run.warmup],
        }


def _request(answer: Answer) -> dict[str, Any]:
    figures = {figure.name: figure.of(answer) for figure in PER_REQUEST} if answer.error is None else {}
    return {**asdict(answer), "figures": {name: value for name, value in figures.items() if value is not None}}


def table(measured: Measured) -> str:
    """One run: a row per figure."""
    summary = measured.summary()
    rows = [["", "mean", *(f"p{p}" for p in PERCENTILES), "n"]]
    for figure in PER_REQUEST:
        if spread := summary.spreads.get(figure.name):
            values = [spread.mean, *spread.percentiles.values()]
            rows.append([_label(figure), *(_number(value) for value in values), str(spread.count)])
    lines = [_title(measured), "", *_aligned(rows), ""]
    totals = [[_label(f), _number(summary.totals[f.name])] for f in OF_RUN if f.name in summary.totals]
    lines += [*_aligned(totals), "", *_errors(measured, summary)]
    return "\n".join(lines)


def comparison(servers: Sequence[Measured]) -> str:
    """Several servers under the same workload: a column each, and the ratio of each further one to the first."""
    first, *others = [(server, server.summary()) for server in servers]
    head = ["", *(server.name for server in servers), *(f"{o.name} / {first[0].name}" for o, _ in others), "better"]
    rows = [head]
    for label, better, values in _compared([first[1], *(summary for _, summary in others)]):
        ratios = [_ratio(value, values[0]) for value in values[1:]]
        rows.append([label, *(_number(value) for value in values), *ratios, better])
    lines = [_workload_line(servers[0].workload), "", *_aligned(rows)]
    for server in servers:
        started = "" if server.ready_s is None else f"; healthy {server.ready_s:.1f} s after: {server.command}"
        lines += ["", f"{server.name}: {server.run.model} at {server.base_url}{started}"]
        lines += _errors(server, server.summary())
    return "\n".join(lines)


def _compared(summaries: Sequence[Summary]) -> list[tuple[str, str, list[float | None]]]:
    rows: list[tuple[str, str, list[float | None]]] = []
    for figure in PER_REQUEST:
        spreads = [summary.spreads.get(figure.name) for summary in summaries]
        for p in PERCENTILES if any(spreads) else ():
            rows.append(
                (f"{_label(figure)} p{p}", figure.better, [None if s is None else s.percentiles[p] for s in spreads])
            )
    for total in OF_RUN:
        values = [summary.totals.get(total.name) for summary in summaries]
        if any(value is not None for value in values):
            rows.append((_label(total), total.better, values))
    return rows


def _ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"


def _label(figure: Figure) -> str:
    return f"{figure.label} {figure.unit}".strip()


def _title(measured: Measured) -> str:
    return f"{measured.run.model} at {measured.base_url}\n{_workload_line(measured.workload)}"


def _workload_line(workload: Workload) -> str:
    load = f"{workload.concurrency} at a time" if workload.concurrency else f"Poisson, {workload.rate:g} per second"
    asked = [] if workload.kind == "transcription" else [f"{workload.words} words in"]
    if workload.max_tokens is not None:
        asked.append(f"at most {workload.max_tokens} tokens out")
    if workload.audio is not None or workload.audio_seconds is not None:
        length = f"{workload.audio_seconds:g} s of " if workload.audio_seconds else ""
        asked.append(f"{length}{'synthesised sound' if workload.audio is None else workload.audio} in")
    return (
        f"{workload.kind}: {workload.requests} requests, {load}, {', '.join(asked)}, seed {workload.seed}, "
        f"{workload.warmup} for warm-up"
    )


def _errors(measured: Measured, summary: Summary) -> list[str]:
    failed = sum(number for number, _ in summary.errors.values())
    lines = [f"errors: {failed} of {summary.requests}"]
    lines += [f"  {kind}: {number} ({said})" for kind, (number, said) in summary.errors.items()]
    warm = [a for a in measured.run.warmup if a.error is not None]
    if warm:
        lines.append(f"errors in the warm-up: {len(warm)} of {len(measured.run.warmup)} ({warm[0].error})")
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
