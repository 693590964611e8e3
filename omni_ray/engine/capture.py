"""CUDA graphs, captured one at a time: PyTorch allows one capture in a process, and several stages may share one."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

logger = logging.getLogger(__name__)

_ONE_AT_A_TIME: Final = threading.Lock()


def captured(
    compute: Callable[[], None], stream: torch.cuda.Stream | None = None, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """A graph of what ``compute`` launches, after running it once, which compiles its kernels.

    Waits while another thread captures; graphs that exist are replayed meanwhile, on any stream.

    Args:
        compute: launches kernels and nothing else.
        stream: to run and capture on; None for one of its own, behind the work of the current one.
        pool: whose memory the graph shares, or None for memory of its own.
    """
    if stream is None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread-local: other threads launch, and allocate, meanwhile
        with _ONE_AT_A_TIME, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            compute()
    return graph


class Captures:
    """Captures graphs that nobody waits for, one after another on a thread of its own, while the engine works already.

    The thread is no daemon: one that is inside PyTorch while the interpreter goes away aborts the whole process.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="captures")

    def add(self, what: str, capture: Callable[[], None]) -> None:
        """Capture it behind those before it; one that fails is logged as ``what``, and whoever wants it does without.

        Raises:
            RuntimeError: after ``stop``.
        """
        self._thread.submit(_capture, what, capture)

    def wait(self) -> None:
        """Until all that was added is captured."""
        self._thread.submit(lambda: None).result()

    def stop(self) -> None:
        """End with the graph that is being captured; blocking."""
        self._thread.shutdown(cancel_futures=True)


def _capture(what: str, capture: Callable[[], None]) -> None:
    try:
        with torch.inference_mode():
            capture()
    except Exception:
        logger.exception("not captured: %s", what)
