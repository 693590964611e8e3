"""The engine contract: how one stage computes. Knows no Ray, no HTTP, no other stage."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from omni_ray.config.pipeline import StagePipelineConfig
from omni_ray.engine.options import EngineOptions
from omni_ray.engine.resume import Resume
from omni_ray.engine.types import Output, Request

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What an engine is built from.

    Attributes:
        stage: the stage's declaration.
        model: checkpoint directory or hub id; None where a pipeline needs no weights.
        model_cls: the class that ``OmniModelRegistry`` gives for what the chosen engine computes of ``stage``.
        options: an instance of the option model that the stage's engine publishes.
        load_format: ``auto`` reads weights, ``dummy`` makes random ones.
        progress: called with one line per step of a long start.
    """

    stage: StagePipelineConfig
    model: str | None
    model_cls: type[Any]
    options: EngineOptions
    load_format: Literal["auto", "dummy"] = "auto"
    progress: Progress = print


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics and autoscaling.

    Attributes:
        oldest_wait_s: the longest wait of a request still queued.
        kv_bytes: KV cache set aside, used or not. encoder_bytes: features of media that live requests hold.
    """

    running: int
    queued: int
    oldest_wait_s: float
    max_num_seqs: int
    kv_bytes: int = 0
    encoder_bytes: int = 0


class Engine(ABC):
    """Computes one stage for many requests at once.

    ``start`` once; then any number of concurrent ``generate`` calls; then ``stop``. One request's failure touches that
    request only. Closing the iterator stops the work within one step and frees everything.

    Attributes:
        resumable: whether a request whose replica died can go on in another one. ``none``: it cannot. ``replay``: what
            was made is made again, from the record (tokens, code frames) where there is one. ``state``: the engine
            takes its state over without computing anything again.
        reads_ahead: whether it takes inputs before it can compute with them; its asking then says nothing of idleness.
    """

    resumable: Literal["none", "replay", "state"] = "none"
    reads_ahead = False

    def __init__(self, context: EngineContext) -> None:
        self.context = context

    @abstractmethod
    async def start(self) -> None:
        """Load weights and warm up. Raises on any missing file or tensor; the stage then never takes traffic."""

    @abstractmethod
    def generate(
        self, request: Request, inputs: Mapping[str, AsyncGenerator[Any, None]], resume: Resume | None = None
    ) -> AsyncGenerator[Output, None]:
        """Compute ``request``.

        Args:
            request: with ``sampling`` resolved for this stage.
            inputs: one generator of typed inputs per source of this stage's edges, as its processors yield them. They
                are lazy: nothing upstream runs before the first ``__anext__``, so a full engine refuses first.
            resume: what this stage had made before a replica died; never given to an engine that is not ``resumable``.

        Yields:
            Chunks in order of position, then exactly one ``Finish``. With ``resume`` too everything from position 0 on,
            because later stages start anew as well; only sound begins behind ``resume.samples``.

        Raises:
            SaturatedError: before the first output, if the engine's bounded queue is full.
        """

    @abstractmethod
    async def check_health(self) -> None:
        """Raise if the engine is dead or hung (work in hand, no output for ``stall_s``), never if idle or busy.

        Raises:
            EngineDiedError: what it computes with is gone; ``generate`` raises it too, and the replica ends at once.
            StageFailedError: it hangs.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """Counters right now; all zero when no request is alive."""

    def frame_rate(self) -> float | None:
        """Code frames for one second of sound, of an engine that makes them and knows; after ``start``."""
        return None

    @abstractmethod
    async def stop(self) -> None:
        """Free everything; running requests fail."""


def only_input(inputs: Mapping[str, AsyncGenerator[Any, None]]) -> AsyncGenerator[Any, None]:
    """The input of a stage that has one edge only."""
    (source,) = inputs.values()
    return source
