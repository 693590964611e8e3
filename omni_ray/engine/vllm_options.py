"""Options of the vLLM engine, under vLLM's own names. No heavy imports: builders without vLLM check them."""

from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from omni_ray.engine.options import EngineOptions

RESERVED: Final = frozenset({
    "model", "tokenizer", "load_format", "disable_log_stats", "distributed_executor_backend", "worker_extension_cls",
    "hf_overrides", "generation_config", "skip_tokenizer_init", "data_parallel_size", "pipeline_parallel_size",
    "language_model_only",
})  # fmt: skip
"""vLLM's arguments that follow from the stage, or that our use of vLLM rests on."""


class VLLMOptions(EngineOptions):
    """Options of the vLLM engine; what vLLM's documentation says of a name holds here too.

    Attributes:
        max_model_len: prompt plus generated tokens of one request.
        dtype: of weights and arithmetic.
        tensor_parallel_size: GPUs that one replica computes on; ``num_gpus`` of the replica follows from it.
        gpu_memory_utilization: share of each GPU's memory that vLLM takes, weights and KV cache; must be given, and at
            most the replica's share, where replicas share a GPU.
        kv_cache_memory_bytes: size of the KV cache, instead of what is left of that share.
        max_num_batched_tokens: prompt and answer tokens of one step.
        enable_prefix_caching: reuse the KV of equal beginnings. Prompts with media never reuse any: their hidden rows
            have to be computed.
        enforce_eager: neither compile nor capture CUDA graphs; starts sooner and runs slower.
        compilation_config: see vLLM.
        limit_mm_per_prompt: most media of each kind in one prompt; what is left out is the model's own default.
        mm_processor_cache_gb: memory for processed media, which are found again by their content.
        threads: OpenMP threads of a replica on a CPU; Ray exports OMP_NUM_THREADS=1 to replicas with few CPUs.
        start_timeout_s: a start that takes longer has failed.
        warm_up: before the stage is ready, compute prompts of many lengths, so that all kernels are compiled that a
            request could need (``vllm_warm_up``); on a CPU, one short prompt.
        rehearse: while the model is imported, loaded and compiled, compute one layer of it in a process beside it, so
            that kernels that vLLM compiles when it first needs them are compiled by then (``vllm_rehearsal``). Takes
            some 5 GB of the GPU meanwhile; one GPU, and ``kv_cache_memory_bytes``: vLLM would measure them as its own.
        engine_args: further arguments of vLLM's ``AsyncEngineArgs``; a replica refuses to start with an unknown one.
    """

    max_num_seqs: int = Field(default=64, ge=1)
    max_model_len: int = Field(default=8192, ge=16)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    tensor_parallel_size: int = Field(default=1, ge=1)
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    compilation_config: dict[str, Any] = Field(default_factory=dict)
    limit_mm_per_prompt: dict[str, int] = Field(default_factory=dict)
    mm_processor_cache_gb: float = Field(default=1, ge=0)
    threads: int = Field(default=2, ge=1)
    start_timeout_s: float = Field(default=1800, gt=0)
    warm_up: bool = True
    rehearse: bool = False
    engine_args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _engine_args_are_free(self) -> Self:
        for name in self.engine_args:
            if name in VLLMOptions.model_fields:
                raise ValueError(f"engine_args.{name}: is an option of its own; write {name} beside engine_args")
            if name in RESERVED:
                raise ValueError(f"engine_args.{name}: may not be set here")
        return self

    @model_validator(mode="after")
    def _rehearses_what_it_can(self) -> Self:
        if self.rehearse and self.tensor_parallel_size > 1:
            raise ValueError("rehearse: only for tensor_parallel_size 1")
        if self.rehearse and self.kv_cache_memory_bytes is None:
            raise ValueError(
                "rehearse: needs kv_cache_memory_bytes; else vLLM takes for its own what the copy allocates"
            )
        return self

    def devices(self) -> int:
        """See ``EngineOptions.devices``."""
        return self.tensor_parallel_size

    def placement_problems(self, num_gpus: float) -> list[str]:
        """See ``EngineOptions.placement_problems``."""
        problems = []
        size, share = self.tensor_parallel_size, self.gpu_memory_utilization
        if num_gpus and num_gpus != size and (size > 1 or num_gpus > 1):
            problems.append(f"tensor_parallel_size: {size} needs num_gpus: {size}, the replica has {num_gpus:g}")
        elif 0 < num_gpus < 1 and share is None and self.kv_cache_memory_bytes is None:
            problems.append(
                f"gpu_memory_utilization: must be given, because the replica has only {num_gpus:g} of a GPU; "
                f"vLLM would take nearly all of its memory"
            )
        elif 0 < num_gpus < 1 and share is not None and share > num_gpus:
            problems.append(f"gpu_memory_utilization: {share:g} is more than the {num_gpus:g} GPU that the replica has")
        return problems
