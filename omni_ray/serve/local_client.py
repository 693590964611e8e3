"""A stage that shares its consumer's process (``colocate``): its run is iterated directly, nothing is copied.

Deadlines, errors, refusals and metrics are those of ``StageClient``. There is no handle, no message and no object
store: events are handed over as they are, and latents count in a window as they do between processes.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from omni_ray.config.deploy import StreamingConfig
from omni_ray.engine.types import LatentChunk
from omni_ray.serve.events import Caller, Envelope, OutputEvent
from omni_ray.serve.latents import large
from omni_ray.serve.meters import Labels
from omni_ray.serve.running_stage import RunningStage
from omni_ray.serve.stage_client import Client, Received
from omni_ray.serve.tracing import RunTrace
from omni_ray.serve.window import LocalLatent, Window


class _Side:
    """The consumer's side of one stream."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def took(self) -> None:
        """Nobody counts what is handed over within a process."""

    def arrived(self, nbytes: int) -> LocalLatent:
        return LocalLatent(self._window, nbytes)


class LocalClient(Client):
    """Opens streams to a stage in this process on behalf of another one in it."""

    def __init__(self, stage: str, running: RunningStage, labels: Labels, streaming: StreamingConfig) -> None:
        super().__init__(stage, labels, streaming)
        self._running = running

    async def stream(self, envelope: Envelope, trace: RunTrace | None = None) -> AsyncGenerator[Received, None]:
        """See ``Client.stream``."""
        window = Window(self._streaming.window_bytes())
        async with (
            aclosing(self._running.run(envelope, Caller(self._consumer, self.stage), window)) as batches,
            aclosing(self._events(batches, _Side(window), trace)) as events,
        ):
            async for received in events:
                yield received

    def _latent_bytes(self, event: OutputEvent) -> int:
        if event.ref is not None or not isinstance(event.output, LatentChunk):
            return 0  # behind a ref it counts in the window of the stream that it came from
        return event.output.rows.nbytes if large(event.output, self._streaming.inline_bytes) else 0
