"""Ray's side of the metrics: the instruments of ``monitoring.metrics``, and who records what.

Each is recorded once per request or a few times a second, never per token: an observation costs some 20 microseconds.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from ray.util.metrics import Counter, Gauge, Histogram

from omni_ray.engine.base import EngineStats
from omni_ray.monitoring import metrics
from omni_ray.monitoring.metrics import COMMON, CONTINUITY_S, PREFIX, Metric
from omni_ray.serve.watch import Watch

GAUGES_EVERY_S = 2.0
EDGES_EVERY_S = 0.1
"""Of an edge's messages so close together one is timed, and their bytes are told at once: a busy edge has thousands of
messages a second, and an observation costs some 20 microseconds."""
MOST_LEAD_S = 60.0


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels that all metrics of one replica share."""

    application: str
    pipeline: str
    stage: str
    replica: str

    def tags(self) -> dict[str, str]:
        """As Ray takes them."""
        return {
            "application": self.application, "pipeline": self.pipeline, "stage": self.stage, "replica": self.replica,
        }  # fmt: skip


def _counter(metric: Metric, labels: Labels) -> Counter:
    counter = Counter(PREFIX + metric.name, metric.help, (*COMMON, *metric.labels))
    counter.set_default_tags(labels.tags())
    return counter


def _gauge(metric: Metric, labels: Labels) -> Gauge:
    gauge = Gauge(PREFIX + metric.name, metric.help, (*COMMON, *metric.labels))
    gauge.set_default_tags(labels.tags())
    return gauge


def _histogram(metric: Metric, labels: Labels, fixed: Mapping[str, str] | None = None) -> Histogram:
    histogram = Histogram(PREFIX + metric.name, metric.help, list(metric.buckets), (*COMMON, *metric.labels))
    histogram.set_default_tags({**labels.tags(), **(fixed or {})})
    return histogram


class StageMeters:
    """What a stage's replica records of its runs and of itself."""

    def __init__(self, labels: Labels) -> None:
        self._requests = _counter(metrics.STAGE_REQUESTS, labels)
        self._in_queue = _histogram(metrics.STAGE_IN_QUEUE_S, labels)
        self._first_output = _histogram(metrics.STAGE_FIRST_OUTPUT_S, labels)
        self._gen_time = _histogram(metrics.STAGE_GEN_TIME_S, labels)
        self._prompt_tokens = _counter(metrics.PROMPT_TOKENS, labels)
        self._generation_tokens = _counter(metrics.GENERATION_TOKENS, labels)
        self._audio_tokens = _counter(metrics.AUDIO_TOKENS, labels)
        self._image_tokens = _counter(metrics.IMAGE_TOKENS, labels)
        self._running = _gauge(metrics.STAGE_RUNNING_REQUESTS, labels)
        self._waiting = _gauge(metrics.STAGE_WAITING_REQUESTS, labels)
        self._oldest_wait = _gauge(metrics.STAGE_OLDEST_WAIT_S, labels)
        self._places = _gauge(metrics.STAGE_PLACES, labels)
        self._least_lead = _gauge(metrics.STAGE_LEAST_LEAD_S, labels)
        self._load = _gauge(metrics.STAGE_LOAD, labels)
        self._held_refs = _gauge(metrics.HELD_REFS, labels)
        self._held_ref_bytes = _gauge(metrics.HELD_REF_BYTES, labels)
        self._kv = _gauge(metrics.KV_BYTES, labels)
        self._encoder = _gauge(metrics.ENCODER_BYTES, labels)

    def ended(self, outcome: str, watch: Watch) -> None:
        """A run is over: ``finished``, ``refused``, ``failed`` or ``cancelled``."""
        self._requests.inc(tags={"outcome": outcome})
        if watch.asked is not None:
            self._in_queue.observe(watch.asked - watch.began)
            if watch.first is not None:
                self._first_output.observe(watch.first - watch.asked)
        if outcome == "finished":
            self._gen_time.observe(time.monotonic() - watch.began)
        if watch.usage is not None:
            for counter, count in (
                (self._prompt_tokens, watch.usage.prompt_tokens),
                (self._generation_tokens, watch.usage.completion_tokens),
                (self._audio_tokens, watch.usage.audio_tokens),
                (self._image_tokens, watch.usage.image_tokens),
            ):
                if count:
                    counter.inc(count)

    def now(self, stats: EngineStats, leads: Collection[float], refs: int, ref_bytes: int, load: float) -> None:
        """The state right now; ``leads`` of the streams that have begun to sound; ``load`` as autoscaling sees it."""
        self._running.set(stats.running)
        self._waiting.set(stats.queued)
        self._oldest_wait.set(stats.oldest_wait_s)
        self._places.set(stats.max_num_seqs)
        self._least_lead.set(min([MOST_LEAD_S, *leads]))
        self._load.set(load)
        self._held_refs.set(refs)
        self._held_ref_bytes.set(ref_bytes)
        self._kv.set(stats.kv_bytes)
        self._encoder.set(stats.encoder_bytes)


class EdgeMeters:
    """What a consumer records of one edge."""

    def __init__(self, labels: Labels, producer: str) -> None:
        edge = {"from_stage": producer, "to_stage": labels.stage}
        self._bytes = _counter(metrics.TRANSFER_BYTES, labels)
        self._bytes.set_default_tags({**labels.tags(), **edge})
        self._in_flight = _histogram(metrics.TRANSFER_IN_FLIGHT_S, labels, edge)
        self._rx = _histogram(metrics.TRANSFER_RX_S, labels, edge)
        self._untold = 0
        self._told_at = self._timed_at = 0.0

    def received(self, nbytes: int, sent_at: float) -> None:
        """A message of ``nbytes`` of arrays came; ``sent_at`` on the wall clock, 0 if it does not say."""
        now = time.time()
        self._untold += nbytes
        if self._untold and now - self._told_at > EDGES_EVERY_S:
            self.tell()
        if sent_at and now - self._timed_at > EDGES_EVERY_S:
            self._timed_at = now
            self._in_flight.observe(max(0.0, now - sent_at))

    def tell(self) -> None:
        """Count the bytes that came; also at the end of every stream."""
        if self._untold:
            self._bytes.inc(self._untold)
            self._untold, self._told_at = 0, time.time()

    def read(self, seconds: float) -> None:
        """A latent behind a ref was read."""
        self._rx.observe(seconds)


class IngressMeters:
    """What an ingress replica records."""

    def __init__(self, labels: Labels) -> None:
        self._requests = _counter(metrics.REQUESTS, labels)
        self._latency = _histogram(metrics.E2E_REQUEST_LATENCY_S, labels)
        self._alive = _gauge(metrics.NUM_REQUESTS_RUNNING, labels)
        self._retried = _counter(metrics.REQUESTS_RETRIED, labels)
        self._ready = _gauge(metrics.STAGE_READY, labels)
        self._ttft = _histogram(metrics.TTFT_S, labels)
        self._ttfp = _histogram(metrics.AUDIO_TTFP_S, labels)
        self._rtf = _histogram(metrics.AUDIO_RTF, labels)
        self._underrun = _histogram(metrics.AUDIO_UNDERRUN_S, labels)
        self._streams = _counter(metrics.AUDIO_STREAMS, labels)
        self._continuous = _counter(metrics.AUDIO_CONTINUITY_OK, labels)
        self._seconds = _counter(metrics.AUDIO_SECONDS, labels)
        self._images = _counter(metrics.IMAGES, labels)

    def request_ended(self, route: str, outcome: str, seconds: float) -> None:
        """An HTTP request is over."""
        self._requests.inc(tags={"route": route, "outcome": outcome})
        if outcome == "ok":
            self._latency.observe(seconds, {"route": route})

    def stream_ended(self, watch: Watch) -> None:
        """What the graph answered has been taken to its end, or to where it broke."""
        if watch.first_text is not None:
            self._ttft.observe(watch.first_text - watch.began)
        if watch.images:
            self._images.inc(watch.images)
        sound = watch.playback
        if sound.first is None or sound.last is None:
            return
        self._ttfp.observe(sound.first - watch.began)
        self._rtf.observe((sound.last - watch.began) / sound.audio_s)
        self._underrun.observe(sound.underrun_s)
        self._seconds.inc(sound.audio_s)
        self._streams.inc()
        if sound.underrun_s <= CONTINUITY_S:
            self._continuous.inc()

    def retried(self, kind: Literal["retry", "takeover"]) -> None:
        """An attempt begins again."""
        self._retried.inc(tags={"kind": kind})

    def now(self, alive: int, ready: Mapping[str, bool]) -> None:
        """Requests alive, and which stages answer."""
        self._alive.set(alive)
        for stage, answers in ready.items():
            self._ready.set(int(answers), {"of_stage": stage})
