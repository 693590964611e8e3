"""OpenTelemetry spans of a request: one trace across the ingress and its stages, off unless the deploy config asks.

    request (ingress, child of the client's traceparent)
      hop ...                       one for each message that came from the last stage
      code2wav
        queue, upstream, prefill, hop ...
        talker
          ...

``queue`` lasts until the engine has a place and asks for input, ``upstream`` until the first input comes (a stage that
is fed by the request itself has none), ``prefill`` until the first output.

A stage's span is a child of its consumer's, as streams are opened. The spans inside are made at the end of a run, from
the instants that ``Watch`` noted, so that a run costs nothing more while it computes. Where spans go is OpenTelemetry's
own affair: ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_TRACES_SAMPLER`` and the rest, in every replica's environment.
"""

import os
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from omni_ray.errors import ConfigError
from omni_ray.serve.meters import Labels
from omni_ray.serve.watch import Watch

MAX_HOPS: Final = 1000
"""Messages of one stream that get a span of their own; an attribute says how many more there were."""
_TRACE_CONTEXT = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class Hop:
    """A message that came from ``producer``; wall clock."""

    producer: str
    sent_at: float
    received_at: float
    nbytes: int
    events: int


class Tracing:
    """Makes the spans of one replica.

    Raises:
        ConfigError: the exporter is not installed.
    """

    def __init__(self, labels: Labels) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ConfigError(
                ["observe.tracing needs OpenTelemetry's exporter: pip install 'omni-ray[tracing]'"]
            ) from error
        self._labels = labels
        resource = Resource.create({
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "omni_ray"),
            "service.instance.id": labels.replica,
            "omni_ray.application": labels.application,
            "omni_ray.pipeline": labels.pipeline,
        })  # fmt: skip
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("omni_ray")

    def begin(self, request_id: str, attempt: int, traceparent: str | None) -> "RunTrace":
        """The span of a request in this replica, under the one that ``traceparent`` names."""
        parent = _TRACE_CONTEXT.extract({"traceparent": traceparent} if traceparent else {})
        stage = self._labels.stage
        at_ingress = stage == "ingress"
        span = self._tracer.start_span(
            "request" if at_ingress else stage,
            parent,
            trace.SpanKind.SERVER if at_ingress else trace.SpanKind.INTERNAL,
            {
                "omni_ray.stage": stage,
                "omni_ray.replica": self._labels.replica,
                "omni_ray.request_id": request_id,
                "omni_ray.attempt": attempt,
            },
        )
        return RunTrace(self._tracer, span)

    def stop(self) -> None:
        """Send what is left; blocks, but not for ever."""
        self._provider.shutdown()


class RunTrace:
    """One request in one replica.

    Attributes:
        traceparent: names its span; goes upstream in the envelope.
    """

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._hops: list[Hop] = []
        self._more_hops = 0
        carrier: dict[str, str] = {}
        _TRACE_CONTEXT.inject(carrier, trace.set_span_in_context(span))
        self.traceparent = carrier["traceparent"]

    def hop(self, hop: Hop) -> None:
        """A message came."""
        if len(self._hops) < MAX_HOPS:
            self._hops.append(hop)
        else:
            self._more_hops += 1

    def end(self, watch: Watch, outcome: str) -> None:
        """The run is over, with an outcome as metrics count it."""
        if self._span.is_recording():
            self._inner_spans(watch)
            self._describe(watch, outcome)
        self._span.end()

    def _inner_spans(self, watch: Watch) -> None:
        if watch.asked is not None:
            self._child("queue", watch.wall(watch.began), watch.wall(watch.asked))
            ready = watch.asked
            if watch.fed is not None:
                self._child("upstream", watch.wall(watch.asked), watch.wall(watch.fed))
                ready = watch.fed
            if watch.first is not None:
                self._child("prefill", watch.wall(ready), watch.wall(watch.first))
        for hop in self._hops:
            attributes = {
                "omni_ray.from_stage": hop.producer,
                "omni_ray.bytes": hop.nbytes,
                "omni_ray.events": hop.events,
            }
            self._child("hop", hop.sent_at, max(hop.sent_at, hop.received_at), attributes)

    def _describe(self, watch: Watch, outcome: str) -> None:
        about: dict[str, Any] = {"omni_ray.outcome": outcome}
        if watch.usage is not None:
            about["omni_ray.prompt_tokens"] = watch.usage.prompt_tokens
            about["omni_ray.generation_tokens"] = watch.usage.completion_tokens
            about["omni_ray.audio_tokens"] = watch.usage.audio_tokens
        sound = watch.playback
        if sound.first is not None:
            about["omni_ray.audio_seconds"] = sound.audio_s
            about["omni_ray.audio_underrun_s"] = sound.underrun_s
            self._span.add_event("first audio", timestamp=_ns(watch.wall(sound.first)))
        if watch.first_text is not None:
            self._span.add_event("first text", timestamp=_ns(watch.wall(watch.first_text)))
        if self._more_hops:
            about["omni_ray.hops_left_out"] = self._more_hops
        self._span.set_attributes(about)
        if outcome == "failed":
            self._span.set_status(trace.StatusCode.ERROR)

    def _child(self, name: str, start: float, end: float, attributes: dict[str, Any] | None = None) -> None:
        inside = trace.set_span_in_context(self._span)
        self._tracer.start_span(name, inside, attributes=attributes, start_time=_ns(start)).end(_ns(end))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
