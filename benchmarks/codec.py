"""Milliseconds of GPU time per second of sound of Qwen3-Omni's stateful codec, batched and captured, alone on one GPU.

    python benchmarks/codec.py --out codec.json

Also how far each arithmetic is from upstream's one call in float32, and where the time of a step goes.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from frame import context, published
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_ray.engine.transformers_build import build
from omni_ray.models.qwen3_omni.captured_code2wav import CapturedCode2Wav
from omni_ray.models.qwen3_omni.code2wav import Qwen3OmniCode2Wav
from omni_ray.models.qwen3_omni.options import Code2WavOptions
from omni_ray.models.qwen3_omni.pipeline import CODE2WAV

ARITHMETICS = ("float32", "tf32", "bfloat16")
FRAME_RATE = 12.5


def load(dtype: str, rows: int) -> CapturedCode2Wav:
    options = Code2WavOptions(dtype=dtype, batch_rows=rows, max_num_seqs=64)
    codec = Qwen3OmniCode2Wav(context(CODE2WAV, Qwen3OmniCode2Wav, options))
    torch.manual_seed(0)
    codec.load()
    assert isinstance(codec._decoder, CapturedCode2Wav)
    return codec._decoder


def codes(rows: int, frames: int, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 2048, (frames, 16)) for _ in range(rows)]


def apart() -> dict[str, float]:
    """Each arithmetic's difference from transformers' one call in float32, of the sound's root mean square.

    The random model's last convolution is scaled so that its sound is neither silent nor clamped.
    """
    config = Qwen3OmniMoeConfig.from_pretrained(published()).code2wav_config
    with torch.device("cuda"), torch.inference_mode():
        torch.manual_seed(0)
        upstream = build(Qwen3OmniMoeCode2Wav, config, torch.float32, initialise=True).requires_grad_(False)
        given = codes(1, 100, 5)[0]
        whole = torch.from_numpy(given.T.copy()).cuda()[None]
        torch.backends.cudnn.allow_tf32 = False
        last = upstream.decoder[-1].conv
        last.weight.mul_(2.0**-10)
        last.weight.mul_(0.1 / upstream(whole).std())
        expected = upstream(whole)[0, 0].cpu().numpy()
        found = {}
        for name in ARITHMETICS:
            dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
            model = build(Qwen3OmniMoeCode2Wav, config, dtype, initialise=False).requires_grad_(False)
            model.load_state_dict(upstream.state_dict())
            decoder, past, made = CapturedCode2Wav(model, 1, 1, (25,), name == "tf32"), None, []
            decoder.capture([(1, 25)])
            for start in range(0, 100, 25):
                ((samples, past),) = decoder.step([past], [given[start : start + 25]])
                made.append(samples)
            found[name] = float((np.concatenate(made) - expected).std() / expected.std())
    return found


def time_steps(decoder: CapturedCode2Wav, rows: int, frames: int, steps: int = 12) -> tuple[float, float]:
    """Median ms of a step: of the GPU alone, and from codes to samples in host memory."""
    pasts: list = [None] * rows
    whole = []
    for step in range(steps):
        given = codes(rows, frames, step)
        start = time.perf_counter()
        done = decoder.step(pasts, given)
        whole.append((time.perf_counter() - start) * 1000)
        pasts = [past for _, past in done]
    for past in pasts:
        decoder.release(past)
    batch = decoder._batches[rows, frames]
    assert batch._graph is not None
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(10):
        batch._graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 10, float(np.median(whole[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    args = parser.parse_args()
    result: dict = {"apart": apart()}
    print("difference from one call in float32, of the sound's rms:", result["apart"], flush=True)
    for dtype in ARITHMETICS:
        began = time.perf_counter()
        decoder = load(dtype, max(args.rows))
        print(f"{dtype}: start-up {time.perf_counter() - began:.1f} s, shapes {decoder.shapes()}", flush=True)
        for rows in args.rows:
            for frames in (4, 25):
                if (rows, frames) not in decoder.shapes():
                    continue
                gpu, whole = time_steps(decoder, rows, frames)
                seconds = rows * frames / FRAME_RATE
                result[f"{dtype}, {rows} rows, {frames} frames"] = gpu / seconds, whole / seconds
                print(
                    f"{dtype}, {rows} rows x {frames} frames: {gpu:.2f} ms GPU, {whole:.2f} ms to host;"
                    f" per audio second {gpu / seconds:.3f} / {whole / seconds:.3f} ms",
                    flush=True,
                )
        if dtype != "float32":
            show_profile(decoder)
        del decoder
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


def show_profile(decoder: CapturedCode2Wav) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        done = decoder.step([None] * 16, codes(16, 25, 0))
        torch.cuda.synchronize()
    for _, past in done:
        decoder.release(past)
    found = sorted(((e.self_device_time_total, e.count, e.key) for e in trace.key_averages()), reverse=True)
    print(f"16 rows x 25 frames: {sum(f[0] for f in found) / 1000:.2f} ms in kernels")
    for us, count, name in found[:16]:
        print(f"{us:9.1f} us {count:4} x  {name[:100]}")


if __name__ == "__main__":
    main()
