"""Starts and stops vLLM for one stage: its arguments, and the environment of its processes."""

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Literal

import vllm
from vllm import AsyncEngineArgs, ModelRegistry
from vllm.config import CUDAGraphMode
from vllm.logger import DEFAULT_LOGGING_CONFIG
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.engine.async_llm import AsyncLLM

from omni_ray.config.base import suggest
from omni_ray.config.pipeline import StagePipelineConfig
from omni_ray.engine.child_guard import ChildGuard
from omni_ray.engine.collector import pausing
from omni_ray.engine.vllm_compat import RUNNER, RowTap
from omni_ray.engine.vllm_errors import LONGEST, ErrorLog
from omni_ray.engine.vllm_model import VLLMCheckpoint
from omni_ray.engine.vllm_options import VLLMOptions
from omni_ray.engine.vllm_ranks import RankPid, RankWatch
from omni_ray.engine.vllm_rehearsal import OneLayer, rehearsing
from omni_ray.engine.vllm_warm_up import warm_up_lengths
from omni_ray.errors import ConfigError

TESTED: Final = ("0.26", "0.32")
"""Minor versions of vLLM that this adapter was written for: the GPU's (torch 2.11) and the CPU's (torch 2.13)."""

PLUGINS: Final = "vllm.general_plugins"
PLUGIN: Final = "omni_ray"
"""Our entry point among ``PLUGINS``."""

WARM_UP_CPU: Final = 16
"""Tokens of the only prompt that warms up a CPU."""

STOP_WAIT_S: Final = 2.0
"""vLLM's processes have no work left to finish when they are told to stop."""


class StartedVLLM:
    """vLLM's processes and their client, ``llm``."""

    def __init__(self, llm: AsyncLLM, guard: ChildGuard, errors: ErrorLog) -> None:
        self.llm = llm
        self._guard = guard
        self._errors = errors
        self._watch: RankWatch | None = None
        errors.skip()

    async def watch_ranks(self) -> None:
        """From here on the death of one process is the death of all."""
        self._watch = await RankWatch.of(self.llm, self._guard)

    def why_dead(self) -> str:
        """What the processes said before they died."""
        return self._errors.first() or "its processes are gone, and said nothing"

    def warm_up_sizes(self, longest: int) -> tuple[list[int], int]:
        """Lengths of prompts, and requests at once, that need all kernels that are compiled when first needed.

        Args:
            longest: positions of a prompt and its answer.
        """
        if current_platform.is_cpu():  # compiles nothing when first needed
            return [min(WARM_UP_CPU, longest - 1)], 0
        config = self.llm.vllm_config
        graphs = config.compilation_config
        replayed = graphs.cudagraph_mode.mixed_mode() != CUDAGraphMode.NONE
        most = min(config.scheduler_config.max_num_batched_tokens, longest - 1)
        lengths = warm_up_lengths(most, graphs.max_cudagraph_capture_size if replayed else 0)
        return lengths if self.llm.model_config.is_moe else lengths[-1:], config.scheduler_config.max_num_seqs

    def stop(self) -> None:
        """End the processes; blocking, about ``STOP_WAIT_S``."""
        if self._watch is not None:
            self._watch.stop()
        handler = logging.getLogger(AsyncLLM.__module__)
        handler.addFilter(_not_the_end)
        try:
            self.llm.shutdown(STOP_WAIT_S)
        finally:
            self._guard.release(STOP_WAIT_S)
            handler.removeFilter(_not_the_end)
            self._errors.close()


def start_vllm(
    stage: StagePipelineConfig,
    options: VLLMOptions,
    checkpoint: VLLMCheckpoint,
    load_format: Literal["auto", "dummy"],
    within_s: float,
) -> StartedVLLM:
    """Start vLLM's processes and load the model; blocking, seconds to minutes.

    Args:
        stage: as the pipeline has it.
        options: of the stage's engine.
        checkpoint: what to load.
        load_format: ``dummy`` makes random weights.
        within_s: processes that have not started by then are killed. vLLM waits for them for ever.

    Raises:
        ConfigError: vLLM is no tested version, does not know an argument, or failed, with vLLM's own message; or it
            was not ready in time.
    """
    _check(stage.name, options, checkpoint)
    arguments = _arguments(options, checkpoint, load_format)
    # our plugin resumes what is paused
    runs_plugin = _has_plugin() and PLUGIN in os.environ.get("VLLM_PLUGINS", PLUGIN).split(",")
    errors = ErrorLog(pausing(DEFAULT_LOGGING_CONFIG) if runs_plugin else DEFAULT_LOGGING_CONFIG)
    variables = _variables(options, checkpoint)
    rehearsal = (
        rehearsing(stage.name, OneLayer.of(arguments, stage.sampling), variables) if options.rehearse else nullcontext()
    )
    guard = ChildGuard()
    late = threading.Timer(within_s, guard.kill)
    late.start()
    try:
        # ours to read errors from, which are not the rehearsal's
        logs = _unset({"VLLM_LOGGING_CONFIG_PATH": str(errors.config)})
        with rehearsal, _environment(variables | logs), guard:
            import_model(checkpoint.directory, checkpoint.architecture)
            return StartedVLLM(AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)), guard, errors)
    except Exception as error:  # whatever it is: the stage cannot start
        why = errors.first() or f"{type(error).__name__}: {error}"[:LONGEST]
        if guard.killed:
            why = f"not ready within start_timeout_s, {options.start_timeout_s:g} s; its log says how far it came"
        guard.release(STOP_WAIT_S)
        errors.close()
        raise ConfigError([f"stage {stage.name!r}: vLLM {vllm.__version__} did not start: {why}"]) from error
    finally:
        late.cancel()


def _check(stage: str, options: VLLMOptions, checkpoint: VLLMCheckpoint) -> None:
    """Raise ``ConfigError`` for what is known to fail, or to mean nothing, before anything starts."""
    where = f"stages.{stage}.engine"
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    problems = [
        f"{where}.engine_args.{name}: vLLM {vllm.__version__} has no such argument; {suggest(name, known)}"
        for name in options.engine_args
        if name not in known
    ]
    if ".".join(vllm.__version__.split(".")[:2]) not in TESTED:
        problems.append(f"{where}: vLLM {vllm.__version__} is installed; tested are {' and '.join(TESTED)}")
    if options.deterministic and current_platform.is_cpu():
        problems.append(f"{where}.deterministic: vLLM promises equal bytes on GPUs only")
    if checkpoint.architecture is not None and not _has_plugin():
        problems.append(f"{where}: omni_ray has no entry point in {PLUGINS}; install it again (pip install -e .)")
    if problems:
        raise ConfigError(problems)


def _has_plugin() -> bool:
    return bool(entry_points(group=PLUGINS, name=PLUGIN))


def _arguments(
    options: VLLMOptions, checkpoint: VLLMCheckpoint, load_format: Literal["auto", "dummy"]
) -> dict[str, Any]:
    """Keyword arguments of ``AsyncEngineArgs``."""
    arguments: dict[str, Any] = {
        "model": str(checkpoint.directory),
        "load_format": load_format,
        "dtype": options.dtype,
        "max_model_len": checkpoint.longest(options.max_model_len),
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        # one GPU in the engine's own process, several in workers on this node; vLLM's Ray executor would look for a
        # placement group of another shape than a replica's (cases.md C65)
        "distributed_executor_backend": "uni" if options.tensor_parallel_size == 1 else "mp",
        "enable_prefix_caching": options.enable_prefix_caching,
        "enforce_eager": options.enforce_eager,
        "generation_config": "vllm",  # what the checkpoint says of sampling is the pipeline's to know
        "disable_log_stats": True,
        **options.engine_args,
    }
    for name in ("gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_batched_tokens"):
        if (value := options.model_dump()[name]) is not None:
            arguments[name] = value
    if current_platform.is_cpu() and "enable_chunked_prefill" not in options.engine_args:
        # vLLM's processes die where a prompt of a request with a seed, as all of ours have one, is computed in pieces:
        # they turn its generator back for each piece, and a CPU's generator has no offset
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(arguments["max_model_len"], options.max_num_batched_tokens or 0)
    if options.compilation_config:
        arguments["compilation_config"] = options.compilation_config
    if checkpoint.limit_mm_per_prompt is None:
        arguments["language_model_only"] = True  # else what sees and hears is loaded, and tried at its largest
    else:
        arguments["limit_mm_per_prompt"] = {**checkpoint.limit_mm_per_prompt, **options.limit_mm_per_prompt}
        arguments["mm_processor_cache_gb"] = options.mm_processor_cache_gb
    if checkpoint.architecture is not None:
        arguments["hf_overrides"] = {"architectures": [checkpoint.architecture]}
    extension = RowTap if checkpoint.keeps_rows else RankPid
    arguments["worker_extension_cls"] = f"{extension.__module__}.{extension.__qualname__}"
    return arguments


def _variables(options: VLLMOptions, checkpoint: VLLMCheckpoint) -> dict[str, str]:
    """Environment variables for vLLM's processes; one that is set already stays as it is."""
    variables = {
        "VLLM_PLUGINS": PLUGIN,  # else the plugins of every installed package run in our processes
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM compiles it at start for half a minute, and never calls it for requests with a seed, as all of ours are
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if checkpoint.keeps_rows:
        variables["VLLM_USE_V2_MODEL_RUNNER"] = RUNNER
    if options.deterministic:
        variables["VLLM_BATCH_INVARIANT"] = "1"
    if current_platform.is_cpu():
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else all replicas of a machine sit on the same cores
        if options.tensor_parallel_size == 1:
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no worker process beside the engine's own
    else:
        # Triton's own default. Without it torch.compile moves all Triton kernels of the process, vLLM's own too, below
        # its cache, but only in a start that compiles: the next one, which need not, looks for them in the default
        variables["TRITON_CACHE_DIR"] = str(Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache")
    variables = _unset(variables)
    if current_platform.is_cpu():
        variables["OMP_NUM_THREADS"] = str(options.threads)  # Ray has always set it already
    return variables


def _unset(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of ``variables`` that the environment does not have."""
    return {name: value for name, value in variables.items() if name not in os.environ}


def import_model(directory: Path, architecture: str | None) -> None:
    """Import the model's class here; else vLLM starts a process, which imports all of vLLM, only to look at the class.

    What it saw there it keeps on disk, but a new container has no such files.

    Args:
        directory: of the checkpoint.
        architecture: the class; None for the checkpoint's own.
    """
    load_general_plugins()
    own: list[str] = json.loads((directory / "config.json").read_text()).get("architectures") or []
    for name in own if architecture is None else (architecture,):
        if name in ModelRegistry.models:  # others are transformers' own, if they are anybody's
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Have the variables set while the body runs: child processes inherit them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _not_the_end(record: logging.LogRecord) -> bool:
    """Whether a record says something else than that the processes, which were told to end, are gone."""
    return "output_handler failed" not in record.getMessage()
