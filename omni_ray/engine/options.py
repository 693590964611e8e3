"""Option models that engines publish; a deploy YAML's ``engine:`` block is checked against them. No heavy imports."""

from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from omni_ray.config.base import StrictModel


class EngineOptions(StrictModel):
    """What every engine understands.

    Attributes:
        max_num_seqs: requests computed at once in one replica.
        max_queue: requests that may wait for a place; one more is refused as saturated.
        reserved_seqs: places that only requests of priority 0 (by default: chat) may take, so that they need not wait
            for the end of somebody's batch job. None: an eighth of all, but one of four to seven, and none of fewer.
        queue_timeout_s: longest wait for a place.
        stall_s: with work in hand and no output for this long, the engine counts as hung.
        deterministic: equal bytes alone and in a crowd, at the price of fixed shapes.
        waits: options that say when, and never what: a request may be taken over by a replica where they differ.
    """

    waits: ClassVar[frozenset[str]] = frozenset({"max_queue", "reserved_seqs", "queue_timeout_s", "stall_s"})

    max_num_seqs: int = Field(default=8, ge=1)
    max_queue: int = Field(default=64, ge=0)
    reserved_seqs: int | None = Field(default=None, ge=0)
    queue_timeout_s: float = Field(default=30.0, gt=0)
    stall_s: float = Field(default=30.0, gt=0)
    deterministic: bool = False

    @model_validator(mode="after")
    def _some_place_for_everybody(self) -> Self:
        if self.reserved_seqs is not None and self.reserved_seqs >= self.max_num_seqs:
            raise ValueError(f"reserved_seqs: {self.reserved_seqs} of {self.max_num_seqs} places leave none for others")
        return self

    def places_of(self, priority: int) -> int:
        """How many of the places requests of this priority may take."""
        reserved = self.reserved_seqs
        if reserved is None:
            reserved = max(self.max_num_seqs // 8, int(self.max_num_seqs >= 4))
        return self.max_num_seqs if priority <= 0 else self.max_num_seqs - reserved

    own_process: ClassVar[str | None] = None
    """Why a stage with this engine must be alone in its process, or None: it shares one well."""

    def devices(self) -> int:
        """GPUs that one replica computes on, if it has any; more than one need ``num_gpus`` to be as many."""
        return 1

    def placement_problems(self, num_gpus: float) -> list[str]:
        """What contradicts the GPUs (or the part of one) that a replica has; each begins with the option's name."""
        return []


class PerRequestOptions(EngineOptions):
    """Options of the per-request engine. ``threads`` compute blocking model calls of different requests."""

    threads: int = Field(default=1, ge=1)


class GeneratorOptions(EngineOptions):
    """Options of the generator engine.

    Attributes:
        max_pieces: pieces that a generator may be ahead of its reader.
        trust_remote_code: run the Python files inside the checkpoint. Whoever can write the checkpoint then runs code
            in the replica.
    """

    own_process = "its steps swap the random state of the whole process"

    max_num_seqs: int = Field(default=1, ge=1)
    max_pieces: int = Field(default=4, ge=1)
    trust_remote_code: bool = False


class CodecOptions(EngineOptions):
    """Options of the codec engine.

    Attributes:
        chunk_frames: sizes of successive chunks in frames; the last one repeats. A small first chunk starts the
            sound early, growth keeps the cost per second down.
        chunk_growth: ``schedule`` takes the sizes as they are. ``lead`` takes the largest for which the listener has
            enough sound in hand, so that no stream runs dry while a large chunk fills. Sizes then depend on how
            fast frames come, and where a decoder's arithmetic depends on the size, so do the last bits.
        left_context: frames decoded again before each window, for window codecs; None takes the codec's minimum.
        step_ms: longest decoding step aimed at; chunks that do not fit wait for the next, the most urgent go first.
        threads: torch or BLAS threads of the decoder.
    """

    chunk_frames: tuple[PositiveInt, ...] = Field(default=(4, 8, 16, 25), min_length=1)
    chunk_growth: Literal["schedule", "lead"] = "schedule"
    left_context: int | None = Field(default=None, ge=0)
    step_ms: float = Field(default=200, gt=0)
    threads: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _equal_bytes_need_equal_chunks(self) -> Self:
        if self.deterministic and self.chunk_growth == "lead":
            raise ValueError("chunk_growth: lead depends on the time, and deterministic promises equal bytes; drop one")
        return self


class FrameCodecOptions(CodecOptions):
    """Options of codecs that decode frames of several requests in one batch.

    Attributes:
        max_num_seqs: streams that are open at once, whether or not they have frames to decode: as many as the talkers
            that feed this replica compute. Each holds some 5 to 8 MB where a published codec carries state.
        batch_rows: the most requests decoded in one batch.
    """

    max_num_seqs: int = Field(default=64, ge=1)
    batch_rows: int = Field(default=16, ge=1)


class AROptions(EngineOptions):
    """Options of the torch autoregressive engine.

    Attributes:
        max_model_len: prompt plus generated tokens of one request.
        threads: torch threads; Ray exports OMP_NUM_THREADS=1 to fractional-CPU replicas, so it is set explicitly.
        dtype: ``auto`` takes bfloat16 where the CPU multiplies it natively, else float32.
    """

    max_model_len: int = Field(default=2048, ge=16)
    threads: int = Field(default=2, ge=1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class CodecLMOptions(AROptions):
    """Options of the torch autoregressive engine for models that make code frames.

    A model that misses its stop code is cut off (``length``) at ``base_frames + frames_per_unit * n`` frames once its
    input has ended with n units (text tokens). At 12.5 frames per second the defaults are 4 s plus 1.2 s per token,
    several times what slow speech takes.
    """

    base_frames: int = Field(default=50, ge=1)
    frames_per_unit: int = Field(default=15, ge=1)


class DiffusionOptions(EngineOptions):
    """Options of the diffusion engine.

    Attributes:
        max_num_seqs: pictures computed at once; each has a thread and a schedule of its own, never a batch in common.
        device: torch's name, ``cpu`` or ``cuda``.
        dtype: of all weights.
        threads: torch threads on CPU.
        num_inference_steps, guidance_scale: for requests that name none; None is what diffusers' pipeline does by
            itself. A distilled checkpoint wants few steps and often no guidance.
    """

    max_num_seqs: int = Field(default=1, ge=1)
    reserved_seqs: int | None = Field(default=0, ge=0)
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: int = Field(default=1, ge=1)
    num_inference_steps: int | None = Field(default=None, ge=1)
    guidance_scale: float | None = Field(default=None, ge=0)
