"""Milliseconds of prompts in Qwen3-Omni's talker at the published shape, by CUDA graphs and kernel by kernel.

    python benchmarks/prompt.py

Weights are random (``load_format: dummy``). Host: until the call returns, which is what the decode loop waits for. GPU:
from one call's start to the next one's, made without a pause. Several prompts begin together, in one pack.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from frame import load

from omni_ray.engine.slot_decoder import RopeRows
from omni_ray.models.qwen3_omni.talker import Qwen3OmniTalker
from omni_ray.models.qwen3_omni.talker_input import TalkerPrompt


def write(talker: Qwen3OmniTalker, piece: RopeRows, start: int, slots: Sequence[int]) -> None:
    for slot in slots:
        talker.prefill(slot, piece, start)
    if talker._prompts is not None:
        talker._prompts.flush()


def timed(talker: Qwen3OmniTalker, size: int, start: int, prompts: int, repeats: int = 20) -> tuple[float, float]:
    """Median host ms of one call alone, and mean ms of calls without a pause."""
    piece = talker.encode(TalkerPrompt((151644, 872, *range(3000, 3000 + size), 151644, 77091, 198)))[:size]
    host = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        write(talker, piece, start, range(prompts))
        host.append((time.perf_counter() - began) * 1000)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        write(talker, piece, start, range(prompts))
    torch.cuda.synchronize()
    return statistics.median(host), (time.perf_counter() - began) * 1000 / repeats


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with torch.inference_mode():
        talker = load(64, 4096)
        graphs = talker._prompts
        assert graphs is not None
        talker.captures.wait()
        print("| prompts | positions | behind | graph: host, GPU | kernel by kernel: host, GPU |")
        print("|---|---|---|---|---|")
        for prompts, size, start in ((1, 60, 0), (1, 140, 0), (3, 140, 0), (1, 512, 0), (1, 128, 512), (1, 512, 2048)):
            cells = []
            for talker._prompts in (graphs, None):
                host, gpu = timed(talker, size, start, prompts)
                cells.append(f"{host:.2f}, {gpu:.2f}")
            print(f"| {prompts} | {size} | {start} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
