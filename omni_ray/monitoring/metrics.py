"""Every metric: name, kind, unit, buckets, labels, help, and where the dashboard shows it. The only place for these.

Names and meanings are vLLM-Omni's where it has them, under our prefix. Ray puts ``ray_`` before a name and ``_total``
after a counter's. Every metric has the labels of ``COMMON``; ``stage`` is ``ingress`` for what the ingress measures.

Ray's histograms estimate ``_sum`` from the buckets, so a total that matters (seconds of sound, bytes) is a counter.
"""

from dataclasses import dataclass
from typing import Literal

PREFIX = "omni_ray_"
COMMON = ("application", "pipeline", "stage", "replica")

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)
FAST_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.25, 1.5, 2, 5, 10)

CONTINUITY_S = 0.1
"""Underrun up to this counts as a stream without a gap, as in vLLM-Omni."""

Row = Literal["Listeners", "Requests", "Stages", "Edges", "Memory"]
Unit = Literal["s", "bytes", "", "tokens"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: without the prefix.
        kind: what Prometheus calls it.
        unit: of its value; part of its name, as in vLLM-Omni's.
        row, title: where the dashboard shows it.
        help: what it means.
        labels: beside ``COMMON``.
        buckets: upper bounds of a histogram.
        by: labels that the dashboard tells apart.
        rare: may well never have happened: the dashboard then shows 0 instead of nothing.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: Unit
    row: Row
    title: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    by: tuple[str, ...] = ("stage",)
    rare: bool = False

    @property
    def exported(self) -> str:
        """Its name in Prometheus; a histogram's series add ``_bucket``, ``_count`` and ``_sum``."""
        return f"ray_{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


# --- what a listener notices; measured at the ingress, per stream of sound ---

AUDIO_TTFP_S = Metric(
    "audio_ttfp_s", "histogram", "s", "Listeners", "First audio",
    "request entered the graph (body read, media decoded) -> its first sound reached the ingress",
    buckets=SECONDS, by=("pipeline",),
)  # fmt: skip
AUDIO_RTF = Metric(
    "audio_rtf", "histogram", "", "Listeners", "Real-time factor",
    "(last sound - request entered the graph) / seconds of sound; below 1 it can be streamed",
    buckets=RATIOS, by=("pipeline",),
)  # fmt: skip
AUDIO_UNDERRUN_S = Metric(
    "audio_underrun_s", "histogram", "s", "Listeners", "Playback underrun",
    "seconds that a player stands still which starts at the first sound; per stream, 0 if never",
    buckets=FAST_SECONDS, by=("pipeline",),
)  # fmt: skip
AUDIO_STREAMS = Metric(
    "audio_streams", "counter", "", "Listeners", "Streams of sound that ended",
    "streams of sound that ended, however they ended", by=("pipeline",),
)  # fmt: skip
AUDIO_CONTINUITY_OK = Metric(
    "audio_continuity_ok", "counter", "", "Listeners", "Streams without a gap",
    f"streams of sound whose underrun was at most {CONTINUITY_S:g} s", by=("pipeline",),
)  # fmt: skip
AUDIO_SECONDS = Metric(
    "audio_seconds", "counter", "s", "Listeners", "Audio-seconds per second",
    "seconds of sound that reached the ingress", by=("pipeline",),
)  # fmt: skip
TTFT_S = Metric(
    "ttft_s", "histogram", "s", "Listeners", "First text",
    "request entered the graph -> its first text reached the ingress", buckets=SECONDS, by=("pipeline",),
)  # fmt: skip

# --- requests at the ingress ---

REQUESTS = Metric(
    "requests", "counter", "", "Requests", "Requests by outcome",
    "HTTP requests that ended: ok, invalid (4xx), refused (503, 429), failed (5xx or an error in a stream), "
    "disconnected", labels=("route", "outcome"), by=("outcome",),
)  # fmt: skip
E2E_REQUEST_LATENCY_S = Metric(
    "e2e_request_latency_s", "histogram", "s", "Requests", "Whole request",
    "first byte of a request read -> last byte of its answer sent, of requests with outcome ok",
    labels=("route",), buckets=SECONDS, by=("route",),
)  # fmt: skip
NUM_REQUESTS_RUNNING = Metric(
    "num_requests_running", "gauge", "", "Requests", "Requests alive",
    "requests that hold one of ingress.max_concurrent_requests places right now", by=("pipeline",),
)  # fmt: skip
REQUESTS_RETRIED = Metric(
    "requests_retried", "counter", "", "Requests", "Attempts begun again",
    "attempts begun again because a replica died: retry (nothing was shown yet) or takeover",
    labels=("kind",), by=("kind",), rare=True,
)  # fmt: skip
STAGE_READY = Metric(
    "stage_ready", "gauge", "", "Requests", "Stages that answer",
    "1 if the stage answered the ingress's last ping, else 0", labels=("of_stage",), by=("of_stage",),
)  # fmt: skip

IMAGES = Metric(
    "images", "counter", "", "Requests", "Pictures",
    "finished pictures that reached the ingress", by=("pipeline",), rare=True,
)  # fmt: skip

# --- stages, per request ---

STAGE_REQUESTS = Metric(
    "stage_requests", "counter", "", "Stages", "Runs by outcome",
    "runs that ended in a stage: finished, refused (no room), failed, cancelled",
    labels=("outcome",), by=("stage", "outcome"),
)  # fmt: skip
STAGE_IN_QUEUE_S = Metric(
    "stage_in_queue_s", "histogram", "s", "Stages", "Queue wait",
    "run opened -> the engine asks for its input, so it has a place", buckets=FAST_SECONDS,
)  # fmt: skip
STAGE_FIRST_OUTPUT_S = Metric(
    "stage_first_output_s", "histogram", "s", "Stages", "First output after the queue",
    "the engine asks for its input -> its first output: upstream's first output and prefill", buckets=SECONDS,
)  # fmt: skip
STAGE_GEN_TIME_S = Metric(
    "stage_gen_time_s", "histogram", "s", "Stages", "Stage time",
    "run opened -> its end, of runs that finished", buckets=SECONDS,
)  # fmt: skip
PROMPT_TOKENS = Metric(
    "prompt_tokens", "counter", "tokens", "Stages", "Prompt tokens per second",
    "prompt tokens of runs that finished, as the engine counts them",
)  # fmt: skip
GENERATION_TOKENS = Metric(
    "generation_tokens", "counter", "tokens", "Stages", "Text tokens per second",
    "text tokens of runs that finished, as the engine counts them",
)  # fmt: skip
AUDIO_TOKENS = Metric(
    "audio_tokens", "counter", "tokens", "Stages", "Code frames per second",
    "code frames made or decoded by runs that finished, as the engine counts them",
)  # fmt: skip

IMAGE_TOKENS = Metric(
    "image_tokens", "counter", "tokens", "Stages", "Image tokens per second",
    "places of a latent that became pictures, of runs that finished", rare=True,
)  # fmt: skip

# --- stages, right now ---

STAGE_RUNNING_REQUESTS = Metric(
    "stage_running_requests", "gauge", "", "Stages", "Requests computed at once",
    "requests that hold a place in the engine right now",
)  # fmt: skip
STAGE_WAITING_REQUESTS = Metric(
    "stage_waiting_requests", "gauge", "", "Stages", "Requests waiting",
    "requests in the engine's queue right now",
)  # fmt: skip
STAGE_OLDEST_WAIT_S = Metric(
    "stage_oldest_wait_s", "gauge", "s", "Stages", "Oldest in the queue",
    "longest wait of a request still in the engine's queue",
)  # fmt: skip
STAGE_PLACES = Metric(
    "stage_places", "gauge", "", "Stages", "Places", "max_num_seqs of the replica: requests it can compute at once",
)  # fmt: skip
STAGE_LOAD = Metric(
    "stage_load", "gauge", "", "Stages", "Load of a replica",
    "what the replica has to do, as a part of what it can: places, or seconds of work that its streams need in each "
    "second; at least 1 if a listener is about to hear a gap because of it. Autoscaling follows the sum over replicas",
)  # fmt: skip
STAGE_LEAST_LEAD_S = Metric(
    "stage_least_lead_s", "gauge", "s", "Listeners", "Least slack of a listener",
    "lead of the live stream that has least: seconds of sound emitted minus seconds since the first; below 0 somebody "
    "hears a gap; code frames count as if they sounded at once. At most 60, and 60 while nobody listens",
)  # fmt: skip

# --- edges; measured by the consumer ---

TRANSFER_BYTES = Metric(
    "transfer_bytes", "counter", "bytes", "Edges", "Bytes per second",
    "bytes of arrays (sound, latents, code frames) that crossed the edge, inline or behind object refs",
    labels=("from_stage", "to_stage"), by=("from_stage", "to_stage"),
)  # fmt: skip
TRANSFER_IN_FLIGHT_S = Metric(
    "transfer_in_flight_s", "histogram", "s", "Edges", "Time of a message in flight",
    "message taken for sending by the producer -> received by the consumer, of one message per edge and 0.1 s; across "
    "nodes as good as their clocks",
    labels=("from_stage", "to_stage"), buckets=FAST_SECONDS, by=("from_stage", "to_stage"),
)  # fmt: skip
TRANSFER_RX_S = Metric(
    "transfer_rx_s", "histogram", "s", "Edges", "Time to read a latent behind a ref",
    "waiting for the object store to hand over one latent",
    labels=("from_stage", "to_stage"), buckets=FAST_SECONDS, by=("from_stage", "to_stage"), rare=True,
)  # fmt: skip

# --- memory ---

HELD_REFS = Metric(
    "held_refs", "gauge", "", "Memory", "Object refs held", "object refs that live runs of the replica still know",
)  # fmt: skip
HELD_REF_BYTES = Metric(
    "held_ref_bytes", "gauge", "bytes", "Memory", "Bytes behind held refs", "latent bytes behind these refs",
)  # fmt: skip
KV_BYTES = Metric(
    "kv_bytes", "gauge", "bytes", "Memory", "KV memory", "KV cache that the engine has set aside; 0 if it has none",
)  # fmt: skip
ENCODER_BYTES = Metric(
    "encoder_bytes", "gauge", "bytes", "Memory", "Encoder memory",
    "features of sound and images that live requests hold in the engine; 0 if it has none",
)  # fmt: skip

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
