"""What an 8-bit KV cache changes of Qwen3-Omni's talker: logits and codes against bfloat16, greedily, random weights.

    python benchmarks/kv_cache.py

Both talkers have the same weights and prompts. Forced: each frame begins from what the bfloat16 one said last, so that
only the cache differs. Free: each goes on from its own codes. The eager step with the bfloat16 cache says what a change
of no more than the order of sums makes.
"""

import argparse
from collections.abc import Sequence

import torch
from frame import load
from torch import Tensor

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.ar_model import PREFILL_CHUNK
from omni_ray.engine.types import Request
from omni_ray.models.qwen3_omni.talker import Qwen3OmniTalker
from omni_ray.models.qwen3_omni.talker_input import TalkerPrompt, TalkerText

GREEDY = SamplingParams(temperature=0, repetition_penalty=1.05)
ROWS = 8


def start(talker: Qwen3OmniTalker, length: int) -> None:
    """Prompts of ``length`` and a few more positions, in all slots."""
    for slot in range(ROWS):
        user = range(3000 + 1000 * slot, 3000 + 1000 * slot + length)
        rows = talker.encode(TalkerPrompt((151644, 872, *user, 151644, 77091, 198)))
        talker.begin(slot, rows)
        for begin in range(0, len(rows), PREFILL_CHUNK):
            talker.prefill(slot, rows[begin : begin + PREFILL_CHUNK], begin)
        talker.sample_as(slot, Request(str(slot), slot, sampling=GREEDY))
        talker.feed(slot, TalkerText(tuple(range(2000, 2012))))
        talker.end_feed(slot)


def speak(
    talker: Qwen3OmniTalker, length: int, frames: int, forced: Sequence[Tensor] = (), eager: bool = False
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Codes [frames, rows, 16], codebook 0's logits [frames, rows, V], and what each frame was begun from."""
    start(talker, length)
    captured = talker._captured
    assert captured is not None
    slots, codes, logits, begun = list(range(ROWS)), [], [], []
    for frame in range(frames):
        if forced:
            talker._tables.last[:ROWS].copy_(forced[frame])
        begun.append(talker._tables.last[:ROWS].clone())
        if eager:
            step = talker.step_eagerly(slots, [frame] * ROWS)
            logits.append(step.evidence[:, :3072].clone())
        else:
            step = talker.step(slots, [frame] * ROWS)
            logits.append(captured.graphs.program(ROWS).logits.clone())
        codes.append(step.frames)
    return torch.stack(codes), torch.stack(logits), begun


def compare(name: str, codes: Tensor, logits: Tensor, other_codes: Tensor, other: Tensor) -> None:
    error = (other - logits).norm(dim=-1) / logits.norm(dim=-1)
    top = (other.argmax(-1) == logits.argmax(-1)).float().mean()
    same = (codes == other_codes).float()
    print(
        f"{name:32} logits {error.mean():.4f} (worst row {error.max():.4f}), best code equal {top:.3f}, codes equal: "
        f"first {same[..., 0].mean():.3f}, all {same.mean():.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 3000])
    parser.add_argument("--frames", type=int, default=24)
    args = parser.parse_args()
    talkers = []
    for kind in ("auto", "fp8"):
        torch.manual_seed(0)
        talkers.append(load(ROWS, max(args.lengths) + 200, kv_cache_dtype=kind))
    plain, small = talkers
    for talker in talkers:
        talker.captures.wait()  # from here on every prompt goes the same way
    same = zip(plain._upstream.parameters(), small._upstream.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    print(f"KV: {plain.kv_bytes() / 1e9:.3f} and {small.kv_bytes() / 1e9:.3f} GB", flush=True)
    for length in args.lengths:
        codes, logits, begun = speak(plain, length, args.frames)
        print(f"prompts of {length}, {args.frames} frames of {ROWS} rows, {len(codes.unique())} different codes")
        compare("bfloat16, eager, forced", codes, logits, *speak(plain, length, args.frames, begun, eager=True)[:2])
        compare("fp8, forced", codes, logits, *speak(small, length, args.frames, begun)[:2])
        compare("bfloat16, eager, free", codes, logits, *speak(plain, length, args.frames, eager=True)[:2])
        compare("fp8, free", codes, logits, *speak(small, length, args.frames)[:2])


if __name__ == "__main__":
    with torch.inference_mode():
        main()
