"""Every figure that bench reports, defined once; and how a run becomes figures.

Only requests without an error count, except in the number of requests and errors. Names and meanings are vLLM-Omni's
where it has them (``vllm bench serve --omni``); times are seconds at this client, so network and queueing are in them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from omni_ray.bench.answer import Answer
from omni_ray.bench.load import Run

PERCENTILES = (50, 95, 99)
Better = Literal["lower", "higher", ""]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: its name in JSON, what the table calls it, its unit, its definition, and which way is better."""

    name: str
    label: str
    unit: str
    definition: str
    better: Better = "lower"


@dataclass(frozen=True, slots=True)
class PerRequest(Figure):
    """A figure of each request; None where the request has none. The table shows its mean and percentiles."""

    of: Callable[[Answer], float | None] = lambda _: None


@dataclass(frozen=True, slots=True)
class OfRun(Figure):
    """One figure of a whole run; None where it has no meaning."""

    of: Callable[[Run, Sequence[Answer], float], float | None] = lambda *_: None


def _since_sent(answer: Answer, at: float | None) -> float | None:
    return None if at is None else at - answer.sent


def _tpot(answer: Answer) -> float | None:
    tokens = answer.text_tokens or 0
    if tokens < 2 or answer.first_text is None or answer.last_text is None or answer.last_text == answer.first_text:
        return None
    return (answer.last_text - answer.first_text) / (tokens - 1)


def _rtf(answer: Answer) -> float | None:
    sound = answer.playback
    return None if sound.last is None else (sound.last - answer.sent) / sound.audio_s


def _input_rtf(answer: Answer) -> float | None:
    return (answer.ended - answer.sent) / answer.input_audio_s if answer.input_audio_s else None


PER_REQUEST = (
    PerRequest(
        "ttft_s", "first text", "s", "request sent -> first text that is not empty; a chunk with only a role is none",
        of=lambda a: _since_sent(a, a.first_text),
    ),
    PerRequest(
        "tpot_s", "per text token", "s",
        "(last text - first text) / (text tokens - 1); only where the server's usage counts text tokens",
        of=_tpot,
    ),
    PerRequest(
        "audio_ttfp_s", "first audio", "s", "request sent -> first sample of sound; a header alone is none",
        of=lambda a: _since_sent(a, a.playback.first),
    ),
    PerRequest(
        "e2el_s", "whole answer", "s", "request sent -> last byte of the answer", of=lambda a: a.ended - a.sent
    ),
    PerRequest(
        "audio_duration_s", "audio", "s", "seconds of sound delivered", "",
        of=lambda a: a.playback.audio_s if a.playback.first is not None else None,
    ),
    PerRequest(
        "audio_rtf", "RTF", "", "(last sound - request sent) / audio_duration_s, so first audio is in it",
        of=_rtf,
    ),
    PerRequest(
        "audio_underrun_s", "underrun", "s",
        "a player starts at the first sound, at real-time speed; at each later arrival the deficit is the time since "
        "then minus the sound that had come before; the worst deficit, which is all the time that the player waited",
        of=lambda a: a.playback.underrun_s if a.playback.first is not None else None,
    ),
    PerRequest(
        "input_rtf", "RTF of input", "", "(last byte - request sent) / seconds of the clip that was sent",
        of=_input_rtf,
    ),
)  # fmt: skip


def _rate(total: float, run: Run) -> float | None:
    return total / run.wall_s if total else None


def _continuity(answers: Sequence[Answer], threshold_s: float) -> float | None:
    streams = [a.playback.underrun_s <= threshold_s for a in answers if a.playback.first is not None]
    return sum(streams) / len(streams) if streams else None


OF_RUN = (
    OfRun(
        "audio_continuity_ok_rate", "streams without underrun", "", "share of streams whose underrun is at most the "
        "threshold (0.1 s unless given)", "higher", of=lambda run, good, limit: _continuity(good, limit),
    ),
    OfRun(
        "audio_throughput", "audio-seconds per second", "", "seconds of sound of all requests / wall_s", "higher",
        of=lambda run, good, limit: _rate(sum(a.playback.audio_s for a in good), run),
    ),
    OfRun(
        "text_throughput", "text tokens per second", "1/s", "text tokens of all requests, as the server's usage counts "
        "them / wall_s", "higher", of=lambda run, good, limit: _rate(sum(a.text_tokens or 0 for a in good), run),
    ),
    OfRun(
        "input_audio_throughput", "input audio-seconds per second", "", "seconds of sound sent / wall_s", "higher",
        of=lambda run, good, limit: _rate(sum(a.input_audio_s for a in good), run),
    ),
    OfRun(
        "request_throughput", "requests per second", "1/s", "requests without an error / wall_s", "higher",
        of=lambda run, good, limit: _rate(len(good), run),
    ),
    OfRun(
        "wall_s", "run", "s", "first request sent -> last byte of the last answer; the warm-up is before it",
        of=lambda run, good, limit: run.wall_s,
    ),
    OfRun(
        "most_late_s", "sent too late by", "s", "Poisson only: the most that this client sent a request after its time",
        of=lambda run, good, limit: max((a.late for a in run.answers), default=0.0) or None,
    ),
    OfRun(
        "client_busy", "client CPU", "", "CPU seconds of this client per second; near 1 the client is the limit",
        of=lambda run, good, limit: run.client_busy,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spread:
    """A per-request figure over a run: number of values, mean, and percentiles (linear interpolation)."""

    count: int
    mean: float
    percentiles: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures; those without a value are missing. ``errors``: how many of each kind, with one message."""

    requests: int
    spreads: Mapping[str, Spread]
    totals: Mapping[str, float]
    errors: Mapping[str, tuple[int, str]]


def summarise(run: Run, continuity_threshold_s: float) -> Summary:
    """Figures of a run's counted requests."""
    good = [a for a in run.answers if a.error is None]
    spreads = {figure.name: spread for figure in PER_REQUEST if (spread := _spread(figure.of(a) for a in good))}
    totals = {}
    for total in OF_RUN:
        value = total.of(run, good, continuity_threshold_s)
        if value is not None:
            totals[total.name] = value
    counts = Counter(a.error for a in run.answers if a.error is not None)
    messages = {a.error: a.message for a in run.answers if a.error is not None}
    errors = {kind: (number, messages[kind]) for kind, number in counts.most_common()}
    return Summary(len(run.answers), spreads, totals, errors)


def _spread(values: Iterable[float | None]) -> Spread | None:
    kept = [value for value in values if value is not None]
    if not kept:
        return None
    points = np.percentile(kept, PERCENTILES)
    return Spread(len(kept), float(np.mean(kept)), {p: float(v) for p, v in zip(PERCENTILES, points, strict=True)})


def definitions() -> str:
    """All figures and their definitions, for people."""
    figures: tuple[Figure, ...] = (*PER_REQUEST, *OF_RUN)
    width = max(len(figure.name) for figure in figures)
    return "\n".join(f"{figure.name:<{width}}  {figure.definition}" for figure in figures)
