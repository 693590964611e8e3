"""Engine options and fault knobs of ``ramp``. A knob counts in the stage's own units: tokens, frames, decode calls."""

from typing import ClassVar

from pydantic import Field, PositiveInt

from omni_ray.config.base import StrictModel
from omni_ray.engine.options import CodecOptions, EngineOptions, PerRequestOptions
from omni_ray.registry import ModelExtras


class Faults(StrictModel):
    """What goes wrong, and at which unit of the stage's output.

    Attributes:
        delay_ms: compute time of each unit.
        fail_at: raise ``ValueError``.
        hang_at: never return.
        kill_at: the process kills itself with SIGKILL.
        nan_at: samples become NaN (code2wav).
        no_eos: never end (talker).
        attempts: of a request's own faults: how many of its first attempts suffer them; None is all.
    """

    delay_ms: float = Field(default=0, ge=0)
    fail_at: int | None = Field(default=None, ge=0)
    hang_at: int | None = Field(default=None, ge=0)
    kill_at: int | None = Field(default=None, ge=0)
    nan_at: int | None = Field(default=None, ge=0)
    no_eos: bool = False
    attempts: int | None = Field(default=None, ge=1)


class RequestFaults(StrictModel):
    """The extra request field ``ramp``: faults for this request alone, where the deploy config allows it.

    ``noise`` mixes the seed into the tag, so that audio depends on it.
    """

    thinker: Faults = Faults()
    talker: Faults = Faults()
    code2wav: Faults = Faults()
    noise: bool = False


EXTRAS = ModelExtras(fields={"ramp": RequestFaults})


class ThinkerOptions(PerRequestOptions):
    """``latent_width`` floats per latent row: wide rows cross as object refs."""

    max_num_seqs: int = Field(default=64, ge=1)
    latent_width: int = Field(default=3, ge=3)
    faults: Faults = Faults()
    allow_request_faults: bool = False


class TalkerOptions(PerRequestOptions):
    """``frames_per_token`` code frames per token; with ``pace_ms`` they come on an even schedule, as a GPU's would.

    ``resumable: false`` stands for an engine whose requests cannot go on in another replica, ``loads: false`` for a
    version whose weights do not load.
    """

    waits: ClassVar[frozenset[str]] = EngineOptions.waits | {"pace_ms"}

    max_num_seqs: int = Field(default=64, ge=1)
    frames_per_token: int = Field(default=3, ge=1)
    pace_ms: float = Field(default=0, ge=0)
    resumable: bool = True
    loads: bool = True
    faults: Faults = Faults()
    allow_request_faults: bool = False


class Code2WavOptions(CodecOptions):
    """``deficit`` samples missing at the end of every decoded window, ``lookahead`` frames needed on the right.

    ``frame_ms`` is the compute time of each new frame of a batch, as of a decoder on a CPU; ``delay_ms`` is a batch's.
    With ``child`` windows are decoded in a child process, as an engine with worker processes does it.
    """

    max_num_seqs: int = Field(default=64, ge=1)
    chunk_frames: tuple[PositiveInt, ...] = Field(default=(4, 25), min_length=1)
    frame_ms: float = Field(default=0, ge=0)
    deficit: int = Field(default=0, ge=0)
    lookahead: int = Field(default=0, ge=0)
    sample_rate: int = Field(default=24000, ge=1)
    channels: int = Field(default=1, ge=1, le=2)
    child: bool = False
    faults: Faults = Faults()
    allow_request_faults: bool = False
