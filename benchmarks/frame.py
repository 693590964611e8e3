"""Milliseconds per frame of Qwen3-Omni's talker at the published shape, captured, alone on one GPU.

    python benchmarks/frame.py --out frame.json            # a table, and where a frame's time goes

Weights are random (``load_format: dummy``), experts and router initialised. A frame is the talker's step, 15 passes of
the code predictor and 16 draws by the published sampling rules, with every row at the same live KV length.
"""

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from omni_ray.config.pipeline import StagePipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.base import EngineContext
from omni_ray.engine.frame_graphs import FrameGraphs
from omni_ray.engine.kernels import launch
from omni_ray.engine.kv_table import KVTable
from omni_ray.engine.types import Request
from omni_ray.models.qwen3_omni.captured_talker import CapturedTalker
from omni_ray.models.qwen3_omni.checkpoint import PUBLISHED
from omni_ray.models.qwen3_omni.options import TalkerOptions
from omni_ray.models.qwen3_omni.pipeline import TALKER
from omni_ray.models.qwen3_omni.talker import Qwen3OmniTalker

SAMPLING = SamplingParams(temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05)
LENGTHS = (1024, 4096)


def published() -> Path:
    """A model directory that holds the published configuration and nothing else."""
    directory = Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(PUBLISHED.read_text())
    return directory


def context(stage: StagePipelineConfig, model_cls: type, options: object) -> EngineContext:
    return EngineContext(stage, str(published()), model_cls, options, "dummy")  # type: ignore[arg-type]


def load(rows: int, length: int, dtype: str = "bfloat16", kv_cache_dtype: str = "auto") -> Qwen3OmniTalker:
    options = TalkerOptions(max_num_seqs=rows, max_model_len=length, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    talker = Qwen3OmniTalker(context(TALKER, Qwen3OmniTalker, options))
    talker.load()
    return talker


def table(captured: CapturedTalker, rows: int, length: int, frame: int) -> np.ndarray:
    return captured.table([(slot, 1000 + slot, frame, length, float(length)) for slot in range(rows)])


def fill(cache: KVTable) -> None:
    """Normally distributed numbers, layer by layer."""
    layers, slots, groups, length, dim = cache.numbers.shape
    device = cache.numbers.device
    everywhere = torch.arange(slots, device=device)[:, None], torch.arange(length, device=device).expand(slots, -1)
    for layer in range(layers):
        noise = torch.randn(slots, groups, length, dim, device=device, dtype=torch.bfloat16)
        cache.write(layer, *everywhere, noise)


def time_frames(captured: CapturedTalker, rows: int, length: int, frames: int = 60) -> float:
    """Median ms from one frame's start to the next one's, frames launched one ahead.

    Rows of numbers that are none, or all alike, would go to no experts or to few: then there is no figure.
    """
    graphs: FrameGraphs = captured.graphs
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(frames + 1)]
    before = None
    for frame in range(frames):
        marks[frame].record()
        flight = graphs.launch(table(captured, rows, length, frame))
        if before is not None:
            before.land()
        before = flight
    marks[frames].record()
    torch.cuda.synchronize()
    assert before is not None
    logits = graphs.program(rows).logits  # type: ignore[attr-defined]
    assert before.land()[:, -1].all(), "numbers are not finite"
    assert len(torch.unique(logits, dim=0)) == rows, "rows are alike"
    return float(np.median([a.elapsed_time(b) for a, b in pairwise(marks[5:])]))


def profile(captured: CapturedTalker, rows: int, length: int, frames: int = 4) -> list[tuple[str, float, float]]:
    """Kernel, launches per frame, microseconds per frame; the largest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CUDA]) as trace:
        for frame in range(frames):
            captured.graphs.launch(table(captured, rows, length, frame)).land()
        torch.cuda.synchronize()
    found = [(e.key, e.count / frames, e.self_device_time_total / frames) for e in trace.key_averages()]
    return sorted((row for row in found if row[2] > 0), key=lambda row: -row[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-overlap", action="store_true", help="launch kernels one strictly after the other")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    args = parser.parse_args()
    torch.set_num_threads(4)
    launch.overlap = not args.no_overlap
    most, longest = max(args.rows), max(LENGTHS)
    began = time.perf_counter()
    with torch.inference_mode():
        talker = load(most, longest + 128, kv_cache_dtype=args.kv_cache_dtype)
        print(f"start-up (weights, kernels, common graphs): {time.perf_counter() - began:.1f} s", flush=True)
        captured = talker._captured
        assert captured is not None
        talker.captures.wait()  # the device may not be waited for while a graph is captured
        print(f"all graphs {captured.graphs.sizes}: {time.perf_counter() - began:.1f} s", flush=True)
        for cache in (talker._talker.keys, talker._talker.values):
            fill(cache)
        for slot in range(most):
            captured.sample_as(slot, Request(str(slot), seed=slot, sampling=SAMPLING))
        result = {}
        for rows in args.rows:
            for length in LENGTHS:
                result[f"{rows} rows, {length}"] = ms = time_frames(captured, rows, length)
                print(f"{rows} rows, KV {length}: {ms:.3f} ms per frame", flush=True)
        for rows in (min(args.rows), most):
            kernels = profile(captured, rows, LENGTHS[0])
            print(f"\n{rows} rows, KV {LENGTHS[0]}: {sum(k[2] for k in kernels) / 1000:.3f} ms in kernels")
            for name, count, us in kernels:
                print(f"{us:9.1f} us {count:6.1f} x {us / count:7.2f} us  {name[:60]}")
            result[f"{rows} rows, kernels"] = kernels
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
