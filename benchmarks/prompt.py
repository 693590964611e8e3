"""Milliseconds of a prompt's piece in Qwen3-Omni's talker at the published shape, by CUDA graph and kernel by kernel.

    python benchmarks/prompt.py

Weights are random (``load_format: dummy``). Host: until the call returns, which is what the decode loop waits for. GPU:
from a piece's start to the next one's, launched without a pause.
"""

import argparse
import statistics
import time

import torch
from frame import load

from omni_ray.models.qwen3_omni.talker import Qwen3OmniTalker
from omni_ray.models.qwen3_omni.talker_input import TalkerPrompt


def timed(talker: Qwen3OmniTalker, size: int, start: int, repeats: int = 30) -> tuple[float, float]:
    """Median host ms of one piece alone, and mean ms of pieces without a pause."""
    piece = talker.encode(TalkerPrompt((151644, 872, *range(3000, 3000 + size), 151644, 77091, 198)))[:size]
    host = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        talker.prefill(0, piece, start)
        host.append((time.perf_counter() - began) * 1000)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for slot in range(repeats):
        talker.prefill(slot, piece, start)
    torch.cuda.synchronize()
    return statistics.median(host), (time.perf_counter() - began) * 1000 / repeats


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with torch.inference_mode():
        talker = load(64, 4096)
        graphs = talker._prompts
        assert graphs is not None
        graphs.wait()
        print("| piece | behind | graph: host, GPU | kernel by kernel: host, GPU |\n|---|---|---|---|")
        for size, start in ((20, 0), (32, 128), (128, 0), (128, 128), (128, 2048)):
            cells = []
            for talker._prompts in (graphs, None):
                host, gpu = timed(talker, size, start)
                cells.append(f"{host:.2f}, {gpu:.2f}")
            print(f"| {size} | {start} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
