"""Runs as one self-contained HTML page: how first audio, RTF and underrun are spread, and when each request ran."""

import html
from collections.abc import Sequence

from omni_ray.bench.answer import Answer
from omni_ray.bench.figures import PER_REQUEST, PerRequest
from omni_ray.bench.report import Measured

_COLOURS = ("#0b62a4", "#c4540c", "#2a8a3c", "#7b3fa0")
_SPREADS = ("ttft_s", "audio_ttfp_s", "audio_rtf", "audio_underrun_s", "e2el_s", "input_rtf")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 420, 240, 46, 34

_STYLE = """body{font:14px/1.45 system-ui,sans-serif;margin:24px;max-width:920px;color:#1b1f24}
figure{display:inline-block;margin:0 20px 24px 0}figcaption{font-weight:600;margin-bottom:4px}
svg text{font-size:11px;fill:#444}pre{background:#f4f5f7;padding:12px;overflow:auto}"""


def page(servers: Sequence[Measured], table: str) -> str:
    """The page; ``table`` is shown below the plots as text."""
    figures = {figure.name: figure for figure in PER_REQUEST}
    parts = [_spread(figures[name], servers) for name in _SPREADS] + [_timeline(server) for server in servers]
    names = ", ".join(html.escape(server.name) for server in servers)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>omni-ray bench: {names}</title>'
        f"<style>{_STYLE}</style><h1>omni-ray bench: {names}</h1>{''.join(parts)}"
        f"<pre>{html.escape(table)}</pre></html>\n"
    )


def _spread(figure: PerRequest, servers: Sequence[Measured]) -> str:
    """Cumulative distribution: how many of the requests had at most x; one step line per server."""
    lines = []
    for server in servers:
        values = [figure.of(answer) for answer in server.run.answers if answer.error is None]
        lines.append(sorted(value for value in values if value is not None))
    most = max((line[-1] for line in lines if line), default=0.0)
    if not any(lines):
        return ""
    scale = (_WIDTH - _LEFT - 10) / (most or 1.0)
    parts = [_axes(most, figure.unit)]
    for k, (server, line) in enumerate(zip(servers, lines, strict=True)):
        points: list[tuple[float, float]] = [(_LEFT, _HEIGHT - _BOTTOM)]
        for n, value in enumerate(line, 1):
            x, y = _LEFT + value * scale, _y(n / len(line))
            points += [(x, points[-1][1]), (x, y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = _COLOURS[k % len(_COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_name(server.name, k, colour))
    unit = f", {figure.unit}" if figure.unit else ""
    return _figure(f"{figure.label}{unit}: share of requests with at most", _HEIGHT, "".join(parts))


def _axes(most: float, unit: str) -> str:
    bottom, parts = _HEIGHT - _BOTTOM, []
    for share in (0.0, 0.5, 0.95, 1.0):
        y = _y(share)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for k in range(5):
        x = _LEFT + (_WIDTH - _LEFT - 10) * k / 4
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{most * k / 4:.3g}{unit}</text>')
    return "".join(parts)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - 24)


def _name(name: str, k: int, colour: str) -> str:
    return f'<text x="{_LEFT + 110 * k}" y="12" style="fill:{colour}">{html.escape(name)}</text>'


def _timeline(server: Measured) -> str:
    """Every request: waiting for its first output light, answering dark, failed red."""
    answers = server.run.answers
    row = max(2.0, min(14.0, 420 / len(answers)))
    height, scale = row * len(answers) + 40, (2 * _WIDTH - _LEFT - 10) / max(server.run.wall_s, 1e-9)
    parts = []
    for n, answer in enumerate(answers):
        y = n * row + 4
        first = _first_output(answer)
        parts.append(_bar(answer.sent, first, y, row, scale, "#c9d6e3"))
        parts.append(_bar(first, answer.ended, y, row, scale, "#b3261e" if answer.error else "#0b62a4"))
    for k in range(5):
        at = server.run.wall_s * k / 4
        parts.append(f'<text x="{_LEFT + at * scale:.1f}" y="{height - 12}" text-anchor="middle">{at:.3g} s</text>')
    title = f"{html.escape(server.name)}: requests over time (light: nothing heard or read yet; red: failed)"
    return _figure(title, height, "".join(parts), 2 * _WIDTH)


def _first_output(answer: Answer) -> float:
    firsts = [at for at in (answer.first_text, answer.playback.first) if at is not None]
    return answer.ended if answer.error or not firsts else (answer.playback.first or min(firsts))


def _bar(start: float, end: float, y: float, row: float, scale: float, colour: str) -> str:
    x, width = _LEFT + start * scale, max((end - start) * scale, 1)
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{row * 0.8:.1f}" fill="{colour}"/>'


def _figure(title: str, height: float, body: str, width: int = _WIDTH) -> str:
    svg = f'<svg role="img" aria-label="{title}" width="{width}" height="{height:.0f}">{body}</svg>'
    return f"<figure><figcaption>{title}</figcaption>{svg}</figure>"
