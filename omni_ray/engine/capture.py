"""CUDA graphs, captured one at a time: PyTorch allows one capture in a process, and several stages may share one."""

import threading
from collections.abc import Callable
from typing import Any, Final

import torch

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
