"""What every log line of a replica carries: our request id, stage and pipeline, beside what Ray Serve adds.

Where several stages share a process, a line of one's tasks names that stage; lines of engines' own threads name the
deployment's.

Serve's own ``request_id`` is another one, and a client may choose it; ours replaces it in lines about a request.

What a replica does not write is that it was asked whether it lives, and does: ingress replicas, Kubernetes and load
balancers ask every other second.
"""

import logging
import re
from contextvars import Context, ContextVar, copy_context

from omni_ray.engine.types import Request, TextPart

LOGGER = "ray.serve"
_PROBE = "GET /(health|ready|metrics)"
_ROUTINE = re.compile(rf"(CALL ping OK|{_PROBE} 200|request \S+ client_id=\S+ key=\S+ {_PROBE} status=200) ")
_request_id: ContextVar[str | None] = ContextVar("omni_ray_request_id", default=None)
_stage: ContextVar[str | None] = ContextVar("omni_ray_stage", default=None)


class _Fields(logging.Filter):
    """Adds fields and lets everything pass."""

    def __init__(self, pipeline: str, stage: str) -> None:
        super().__init__()
        self._fixed = {"pipeline": pipeline, "stage": stage}

    def filter(self, record: logging.LogRecord) -> bool:
        record.__dict__.update(self._fixed)
        if (stage := _stage.get()) is not None:
            record.__dict__["stage"] = stage
        request_id = _request_id.get()
        if request_id is not None:
            record.__dict__["request_id"] = request_id
        return True


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line says something else than that an answer to a probe was what it always is."""
    return record.levelno > logging.INFO or _ROUTINE.match(record.getMessage()) is None


def log_as(pipeline: str, stage: str) -> None:
    """From now on all lines of this replica name its pipeline and stage, and ours go where Serve's go.

    The filter sits on the handlers, so it runs after Serve's own.
    """
    fields, ours = _Fields(pipeline, stage), logging.getLogger("omni_ray")
    ours.setLevel(logging.INFO)
    ours.propagate = False
    for handler in logging.getLogger(LOGGER).handlers:
        handler.addFilter(_is_news)
        handler.addFilter(fields)
        ours.addHandler(handler)


def log_request(request_id: str) -> None:
    """Lines of this task, and of tasks that it starts from now on, are about this request."""
    _request_id.set(request_id)


def stage_context(stage: str) -> Context:
    """The caller's context, for a task whose lines name ``stage``."""
    context = copy_context()
    context.run(_stage.set, stage)
    return context


def log_content(request: Request) -> None:
    """What the user says, where the deploy config asks for it (``observe.log_content``)."""
    said = [
        {"role": message.role, "text": " ".join(part.text for part in message.content if isinstance(part, TextPart))}
        for message in request.messages
    ]
    if request.speech_text is not None:
        said.append({"role": "speech", "text": request.speech_text})
    logging.getLogger(LOGGER).info("content of request %s", request.request_id, extra={"content": said})
