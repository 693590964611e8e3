"""What crosses a process border: the envelope that goes up the chain, and the events that come back down.

Importable in every replica; plain slotted dataclasses, so pickling is cheap and a mismatch is a clear error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_ray.engine.resume import Resume
from omni_ray.engine.types import Clip, CodeFrameChunk, Finish, Output, Pickled, Request, TextChunk, TranscriptChunk
from omni_ray.serve.planner import Plan

Record = TextChunk | TranscriptChunk | CodeFrameChunk | Finish
"""Outputs small enough to be sent along for takeover; sound is its own record, latents are computed again."""


@dataclass(frozen=True, slots=True)
class StoredClip:
    """A medium of the request. With ``ref``, which the ingress owns, its array is empty here and lies behind it."""

    clip: Clip
    ref: Any = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one stage had made before a replica died, and the version of the code that made it."""

    version: str
    resume: Resume


@dataclass(frozen=True, slots=True)
class Envelope:
    """Everything a request's chain of stages gets.

    Attributes:
        request: with the client's own sampling; each stage resolves it for itself.
        plan: which stages take part and how they call each other.
        clips: the request's media.
        traceparent: W3C trace context, or None.
        records: whether stages send records down the trunk, so that another attempt can go on from them.
        resume: per stage that was heard of, what it had made in earlier attempts (takeover).
    """

    request: Request
    plan: Plan
    clips: tuple[StoredClip, ...] = ()
    traceparent: str | None = None
    records: bool = False
    resume: Mapping[str, Recorded] = field(default_factory=dict)

    def holds_refs(self) -> bool:
        """Whether it must travel by the actor path: refs sent over gRPC would never be freed."""
        return any(clip.ref is not None for clip in self.clips)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who opens a stream, and to which stage: a deployment may run several.

    Attributes:
        consumer: the name of the stage that calls, or ``ingress``.
        stage: the stage that is called.
        lifeline: for ref-carrying streams, where the consumer's lifeline listens.
    """

    consumer: str
    stage: str
    lifeline: "LifelineAddress | None" = None


@dataclass(frozen=True, slots=True)
class LifelineAddress:
    """A consumer's lifeline socket and the one-time token of one stream.

    Attributes:
        raylet_port: where, on the same host, the Ray node of the consumer listens.
    """

    host: str
    port: int
    token: str
    raylet_port: int


@dataclass(frozen=True, slots=True)
class Opened:
    """Head of a stream: who computes ``stage``, and what its consumers and a takeover must know of it.

    Attributes:
        replica: its tag.
        schema_versions: of each edge that leaves the stage, by consumer.
        version: of the code and settings that compute here: only the same one may go on with a request.
        resumable: whether the engine can go on with a request of another replica.
    """

    stage: str
    replica: str
    schema_versions: Mapping[str, int]
    version: str = ""
    resumable: bool = False


@dataclass(slots=True, weakref_slot=True)
class OutputEvent:
    """An output of ``stage``. With ``ref``, the latent's rows (``ref_bytes`` bytes) are empty here and lie behind it.

    The last event of a message says when that was sent (``sent_at``, wall clock); on the others it is stale or 0.

    Not frozen: a stream that ended badly sets ``ref`` to None, because a traceback may know the event for long and a
    ref that anybody knows keeps its object in the store.
    """

    stage: str
    output: Output
    ref: Any = None
    ref_bytes: int = 0
    sent_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """An output of an inner stage that no later stage computes with: it rides along to the ingress, for takeover."""

    stage: str
    output: Record

    def __reduce__(self) -> Pickled:
        return RecordEvent, (self.stage, self.output)


@dataclass(frozen=True, slots=True)
class Saturated:
    """The only event of a stream whose stage had no room; an exception would cost a traceback per refusal."""

    stage: str
    message: str
    retry_after_s: int


Event = Opened | OutputEvent | RecordEvent | Saturated
