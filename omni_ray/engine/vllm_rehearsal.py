"""Has vLLM's kernels compiled beside its start: a process of its own computes one layer. Imports no vLLM.

Triton compiles a kernel when it is first needed, and vLLM needs most of its own late: after torch.compile, one after
the other, half a minute for Qwen3-Omni on an H200 with nothing cached. A copy of the model with one layer needs the
same kernels. Computed while the model itself is imported, loaded and compiled, it leaves them in Triton's cache.
"""

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from omni_ray.config.base import StrictModel
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.child_guard import ChildGuard

logger = logging.getLogger(__name__)

# collects nothing: see collector.py; the process is gone before that could matter
CODE: Final = """
import gc, time
now = time.monotonic()
gc.disable()
from omni_ray.engine.vllm_one_layer import main
main(now)
"""

CACHE_BYTES: Final = 2**30
"""Of the copy's KV cache: one layer's share of 48 GiB for 48 layers."""

DROPPED: Final = (
    "worker_extension_cls",  # whoever keeps rows wants a layer that the copy does not have
    "hf_overrides",  # names the class that keeps them
    "compilation_config",
    "limit_mm_per_prompt",
    "mm_processor_cache_gb",
)
"""Arguments of the model that its copy must not have."""

LAST_WORDS: Final = 2000
"""Characters of its output that are logged when it fails."""


class OneLayer(StrictModel):
    """What the process reads from its standard input.

    Attributes:
        arguments: of vLLM's ``LLM``, all but ``hf_overrides``.
        sampling: that the stage has by default.
    """

    arguments: dict[str, Any]
    sampling: SamplingParams

    @classmethod
    def of(cls, arguments: Mapping[str, Any], sampling: SamplingParams) -> "OneLayer":
        """The copy of a model that vLLM is started with.

        Args:
            arguments: of ``AsyncEngineArgs``.
            sampling: that the stage has by default.
        """
        return cls(
            arguments={
                **{name: value for name, value in arguments.items() if name not in DROPPED},
                "load_format": "dummy",
                "enforce_eager": True,
                "language_model_only": True,
                "skip_tokenizer_init": True,
                "kv_cache_memory_bytes": min(CACHE_BYTES, arguments["kv_cache_memory_bytes"]),
                "gpu_memory_utilization": 0.01,  # must be free when it starts, and says nothing else here
            },
            sampling=sampling,
        )


@contextmanager
def rehearsing(stage: str, copy: OneLayer, variables: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Have a process compute ``copy`` while the body runs. Whatever becomes of it is only logged: nobody needs it.

    Args:
        stage: its name, for messages.
        copy: of the model.
        variables: of the environment, beside those of this process.
    """
    guard = ChildGuard()  # its own: the pid of a process that is over may soon be somebody else's
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-c", CODE],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
        guard.add([process.pid])
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as told:  # one that is dead already is told of at the end
            told.write(copy.model_dump_json().encode())
        try:
            yield process
        finally:
            code = process.poll()
            process.kill()
            process.wait()
            guard.release(0)
            output.seek(0)
            _log(stage, code, output.read().decode(errors="replace").strip())


def _log(stage: str, code: int | None, said: str) -> None:
    if code == 0:
        logger.info("stage %s: %s", stage, said.splitlines()[-1])
    elif code is None:
        logger.info("stage %s: one layer was still being computed when vLLM was done; ended", stage)
    else:
        logger.warning("stage %s: computing one layer failed (%d): %s", stage, code, said[-LAST_WORDS:])
