"""The AR engine against transformers' ``generate``: a random Llama of 100 M parameters on CPU; writes ar_engine.md.

One run gives tokens per second of 1 and of 16 streams: ours, transformers one after another, transformers in one batch;
and the price of ``deterministic: true``. The model is voice_chat's ``SlotLlama`` without checkpoint and tokenizer.

python benchmarks/ar_engine.py [--tokens 64] [--prompt 64] [--dtype auto] [--threads 2]
"""

import argparse
import asyncio
import os
import platform
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from omni_ray.config.pipeline import Edge, StageExecutionType, StagePipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.ar import AREngine, ARModel
from omni_ray.engine.ar_model import Probe
from omni_ray.engine.base import EngineContext
from omni_ray.engine.options import AROptions
from omni_ray.engine.precision import compute_dtype
from omni_ray.engine.types import Finish, Request, TextChunk
from omni_ray.models.voice_chat.slot_llama import SlotLlama

HERE = Path(__file__).parent
STREAMS = 16
QUIET = 0.7
"""Load average above which other processes took part."""
TARGETS = {"one": 1.0, "after_another": 5.0, "batched": 1.2}


def random_llama(dtype: torch.dtype) -> LlamaForCausalLM:
    """100 M parameters, equal in every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


class RandomLlama(ARModel):
    """Token ids in, one letter per token out; never stops by itself."""

    stop_ids: frozenset[int] = frozenset()

    def load(self) -> None:
        options = self.context.options
        assert isinstance(options, AROptions)
        torch.set_num_threads(options.threads)
        model = random_llama(compute_dtype(options.dtype))
        self._llama = SlotLlama(model, options.max_num_seqs, options.max_model_len, options.deterministic)

    def encode(self, prompt: Any) -> list[int]:
        return list(prompt)

    def detokenize(self, token_id: int) -> bytes:
        return b"x"

    def prefill(self, slot: int, ids: Any, start: int) -> Tensor:
        return self._llama.prefill(slot, ids, start)

    def step(self, slots: Sequence[int], last_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        return self._llama.step(slots, last_ids, positions)

    def release(self, slot: int) -> None:
        pass

    def probes(self) -> list[Probe]:
        return [Probe(list(range(1, size))) for size in (5, 30, 60)]


def prompts(length: int) -> list[list[int]]:
    return torch.randint(0, 32000, (STREAMS, length), generator=torch.Generator().manual_seed(1)).tolist()


async def ours(args: argparse.Namespace, deterministic: bool) -> tuple[dict[int, float], list[list[int]]]:
    """Tokens per second by number of streams, and the tokens of the 16."""
    edge = Edge(source="request", processor="a:b", parts=("messages",))
    stage = StagePipelineConfig(
        name="thinker", execution_type=StageExecutionType.LLM_AR, model_arch="RandomLlama", inputs=(edge,)
    )
    options = AROptions(
        max_num_seqs=STREAMS,
        max_model_len=max(args.prompt + args.tokens, 64),
        threads=args.threads,
        dtype=args.dtype,
        deterministic=deterministic,
    )
    engine = AREngine(EngineContext(stage, None, RandomLlama, options))
    await engine.start()
    sampling = SamplingParams(temperature=0, max_tokens=args.tokens)

    async def stream(ids: list[int], count: int | None = None) -> list[int]:
        async def one() -> AsyncIterator[Any]:
            yield ids

        request = Request("r", 1, sampling=SamplingParams(max_tokens=count).over(sampling))
        tokens: list[int] = []
        async for output in engine.generate(request, {"request": one()}):
            if isinstance(output, TextChunk):
                tokens += output.token_ids
            assert not isinstance(output, Finish) or output.usage.completion_tokens == (count or args.tokens)
        return tokens

    rates, tokens = {}, list[list[int]]()
    for streams in (1, STREAMS):
        asked = prompts(args.prompt)[:streams]
        await asyncio.gather(*(stream(ids, 4) for ids in asked))  # warm up
        started = time.perf_counter()
        tokens = await asyncio.gather(*(stream(ids) for ids in asked))
        rates[streams] = streams * args.tokens / (time.perf_counter() - started)
    await engine.stop()
    return rates, tokens


@torch.inference_mode()
def theirs(args: argparse.Namespace) -> tuple[dict[str, float], list[list[int]]]:
    """Tokens per second of one stream (the mean of 16, one after another) and of one batch, and the batch's tokens."""
    torch.set_num_threads(args.threads)
    model = random_llama(compute_dtype(args.dtype))
    asked = torch.tensor(prompts(args.prompt))

    def generate(ids: Tensor, count: int) -> Tensor:
        mask = torch.ones_like(ids)
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=count, max_new_tokens=count, pad_token_id=0
        )
        return out[:, ids.shape[1] :]

    rates = {}
    for name, batches in (("after_another", asked.split(1)), ("batched", (asked,))):
        generate(batches[0], 4)
        started = time.perf_counter()
        tokens = [generate(batch, args.tokens) for batch in batches]
        rates[name] = STREAMS * args.tokens / (time.perf_counter() - started)
    return rates, tokens[0].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    hf, hf_tokens = theirs(args)
    default, tokens = asyncio.run(ours(args, deterministic=False))
    fixed, _ = asyncio.run(ours(args, deterministic=True))
    pairs = [(a, b) for row, other in zip(tokens, hf_tokens, strict=True) for a, b in zip(row, other, strict=True)]
    same = sum(a == b for a, b in pairs) / len(pairs)
    ratios = {
        "one": default[1] / hf["after_another"],
        "after_another": default[STREAMS] / hf["after_another"],
        "batched": default[STREAMS] / hf["batched"],
    }
    dtype = str(compute_dtype(args.dtype)).removeprefix("torch.")
    lines = [
        "# AR engine on CPU, random Llama of 100 M parameters",
        "",
        f"{args.prompt} prompt and {args.tokens} generated tokens per stream, greedy, {dtype}, {args.threads} threads;",
        f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()},",
        f"load average {load:.1f} at the start. Tokens per second, prefill included.",
        *([] if load < QUIET else ["", "**The machine was busy: these figures say nothing. Run it again.**"]),
        "",
        "| | 1 stream | 16 streams |",
        "|---|---|---|",
        f"| omni_ray, default | {default[1]:.0f} | {default[STREAMS]:.0f} |",
        f"| omni_ray, `deterministic: true` | {fixed[1]:.0f} | {fixed[STREAMS]:.0f} |",
        f"| transformers `generate`, one after another | {hf['after_another']:.0f} | {hf['after_another']:.0f} |",
        f"| transformers `generate`, one batch | | {hf['batched']:.0f} |",
        "",
        f"- 1 stream: {ratios['one']:.2f}x transformers (target {TARGETS['one']:g}x)",
        f"- 16 streams: {ratios['after_another']:.2f}x one after another (target {TARGETS['after_another']:g}x),"
        f" {ratios['batched']:.2f}x batched (target {TARGETS['batched']:g}x)",
        f"- `deterministic: true` costs {100 * (1 - fixed[STREAMS] / default[STREAMS]):.0f} % at 16 streams,"
        f" {100 * (1 - fixed[1] / default[1]):.0f} % at one",
        f"- {100 * same:.1f} % of the tokens equal transformers' batch, place by place",
    ]
    (HERE / "ar_engine.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
