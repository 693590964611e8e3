"""The codec of ``ramp``: code frames ``(tag, frame number)`` to ``SAMPLES_PER_FRAME`` samples each."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.base import EngineContext
from omni_ray.engine.codec import DecodeItem, Samples, WindowCodec, WindowState
from omni_ray.engine.rechunk import array_of
from omni_ray.engine.types import Request
from omni_ray.models.ramp.child import Child
from omni_ray.models.ramp.options import Code2WavOptions, Faults
from omni_ray.models.ramp.oracle import SAMPLES_PER_FRAME, decode_window
from omni_ray.models.ramp.stages import faults_of


@dataclass(slots=True)
class RampState(WindowState):
    """The window's state, the request's faults, and how many decode calls it had."""

    faults: Faults = field(default_factory=Faults)
    calls: int = 0


class RampCode2Wav(WindowCodec):
    """Decodes by arithmetic; a window comes back ``deficit`` samples short at its end, as a real vocoder's does."""

    samples_per_frame = SAMPLES_PER_FRAME

    def __init__(self, context: EngineContext) -> None:
        assert isinstance(context.options, Code2WavOptions)
        self._options = context.options
        self.sample_rate, self.channels = self._options.sample_rate, self._options.channels
        self.right_context = self._options.lookahead
        super().__init__(context)
        self._child: Child | None = None

    def load(self) -> None:
        """Nothing to load; starts the child process if there is to be one."""
        if self._options.child:
            self._child = Child(self.context.stage.name)

    def check(self) -> None:
        """See ``Codec.check``."""
        if self._child is not None:
            self._child.check()

    def stop(self) -> None:
        """See ``Codec.stop``."""
        if self._child is not None:
            self._child.stop()

    def open(self, request: Request) -> RampState:
        """See ``Codec.open``."""
        return RampState(faults=faults_of(request, self._options, "code2wav"))

    def decode(self, items: Sequence[DecodeItem]) -> list[Samples]:
        """See ``Codec.decode``; what the knobs say happens first."""
        for item in items:
            state = item.state
            if state.faults.kill_at == state.calls:
                os.kill(os.getpid(), signal.SIGKILL)
            if state.faults.hang_at == state.calls:
                time.sleep(1e6)
            if state.faults.fail_at == state.calls:
                raise ValueError(f"fail_at {state.calls}")
        cost_ms = self._options.frame_ms * sum(len(array_of(item.units)) for item in items)
        time.sleep((cost_ms + max(item.state.faults.delay_ms for item in items)) / 1000)
        decoded = super().decode(items)
        for item, output in zip(items, decoded, strict=True):
            if item.state.faults.nan_at == item.state.calls:
                output[:] = np.nan
            item.state.calls += 1
        return decoded

    def decode_windows(self, windows: Sequence[NDArray[np.int64]]) -> list[Samples]:
        """See ``WindowCodec.decode_windows``: frames [n, 2]."""
        return [self._decode_window(window) for window in windows]

    def _decode_window(self, frames: NDArray[np.int64]) -> Samples:
        deficit = self._options.deficit
        sound = decode_window(frames, deficit) if self._child is None else self._child.decode_window(frames, deficit)
        return np.stack([sound, -sound], axis=1) if self.channels == 2 else sound
