"""The AR engine against transformers' ``generate``: a random Llama of 100 M parameters on CPU; writes ar_engine.md.

One run gives tokens per second of 1 and of 16 streams: ours, transformers one after another, transformers in one batch;
and the price of ``deterministic: true``. The model is voice_chat's ``SlotLlama`` without checkpoint and tokenizer.

All contenders are loaded and warmed up first, then take turns, round by round, with the same prompts, threads, dtype
and number of greedy tokens. A ratio is the median of the rounds' ratios, so what else runs on the machine hits both
sides of it.

python benchmarks/ar_engine.py [--rounds 4] [--tokens 64] [--prompt 64] [--dtype auto] [--threads 2]
"""

import argparse
import asyncio
import itertools
import os
import platform
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
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
from omni_ray.engine.types import Request, TextChunk
from omni_ray.models.voice_chat.slot_llama import SlotLlama

HERE = Path(__file__).parent
STREAMS = 16
WARM_UP = 4
"""Tokens generated before anything is timed."""
QUIET = 0.7
"""Load average above which other processes took part."""


Prompts = list[list[int]]
"""Token ids by stream; answers too."""
Contender = Callable[[Prompts, int], Awaitable[Prompts]]
"""Prompts that run at once, and how many tokens each gets -> those tokens."""


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


def prompts(length: int) -> Prompts:
    return torch.randint(0, 32000, (STREAMS, length), generator=torch.Generator().manual_seed(1)).tolist()


class Ours:
    """Our engine: ``start``, then call it with prompts that run at once, then ``stop``."""

    def __init__(self, args: argparse.Namespace, deterministic: bool) -> None:
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
        self.engine = AREngine(EngineContext(stage, None, RandomLlama, options))

    async def __call__(self, asked: Prompts, count: int) -> Prompts:
        return await asyncio.gather(*(self._stream(ids, count) for ids in asked))

    async def _stream(self, ids: list[int], count: int) -> list[int]:
        async def one() -> AsyncGenerator[Any, None]:
            yield ids

        request = Request("r", 1, sampling=SamplingParams(temperature=0, max_tokens=count))
        tokens: list[int] = []
        async for output in self.engine.generate(request, {"request": one()}):
            if isinstance(output, TextChunk):
                tokens += output.token_ids
        assert len(tokens) == count
        return tokens


class Theirs:
    """transformers' ``generate``: prompts of one call are one batch."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        self._model = random_llama(compute_dtype(args.dtype))

    async def __call__(self, asked: Prompts, count: int) -> Prompts:
        ids = torch.tensor(asked)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        tokens: Prompts = out[:, ids.shape[1] :].tolist()
        return tokens


@dataclass
class Figures:
    """Tokens per second of every round by (contender, streams at once), and the tokens of the last 16 streams."""

    rates: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, Prompts] = field(default_factory=dict)

    def rate(self, name: str, streams: int) -> float:
        return median(self.rates[name, streams])

    def ratio(self, streams: int, name: str, other: str, other_streams: int) -> str:
        """Of two contenders' rates, round by round: the median, the least and the greatest."""
        ratios = [a / b for a, b in zip(self.rates[name, streams], self.rates[other, other_streams], strict=True)]
        return f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


async def measure(args: argparse.Namespace) -> Figures:
    default, fixed = Ours(args, deterministic=False), Ours(args, deterministic=True)
    await default.engine.start()
    await fixed.engine.start()
    contenders: dict[str, Contender] = {"default": default, "fixed": fixed, "transformers": Theirs(args)}
    asked, figures = prompts(args.prompt), Figures()
    for contender in contenders.values():
        for streams in (1, STREAMS):
            await contender(asked[:streams], WARM_UP)
    for turn in range(args.rounds):
        for name, contender in contenders.items():
            singles = [[ids] for ids in asked[turn :: args.rounds]]  # all rounds together run each prompt alone
            for streams, calls in ((1, singles), (STREAMS, [asked])):
                started = time.perf_counter()
                for call in calls:
                    figures.tokens[name] = await contender(call, args.tokens)
                count = args.tokens * sum(map(len, calls))
                figures.rates[name, streams].append(count / (time.perf_counter() - started))
    await default.engine.stop()
    await fixed.engine.stop()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, choices=range(1, STREAMS + 1), metavar="ROUNDS")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    figures = asyncio.run(measure(args))
    rate, ratio = figures.rate, figures.ratio
    theirs = itertools.chain(*figures.tokens["transformers"])
    pairs = list(zip(itertools.chain(*figures.tokens["default"]), theirs, strict=True))
    same = sum(a == b for a, b in pairs) / len(pairs)
    dtype = str(compute_dtype(args.dtype)).removeprefix("torch.")
    busy = "**The machine was busy: the tokens per second are too low, only the ratios say something.**"
    lines = [
        "# AR engine on CPU, random Llama of 100 M parameters",
        "",
        f"{args.prompt} prompt and {args.tokens} generated tokens per stream, greedy, {dtype}, {args.threads} threads;",
        f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()},",
        f"load average {load:.1f} at the start. Tokens per second, prefill included; medians of {args.rounds} rounds",
        "in which the contenders took turns. In brackets the least and the greatest round.",
        *([] if load < QUIET else ["", busy]),
        "",
        "| | 1 stream | 16 streams |",
        "|---|---|---|",
        f"| omni_ray, default | {rate('default', 1):.0f} | {rate('default', STREAMS):.0f} |",
        f"| omni_ray, `deterministic: true` | {rate('fixed', 1):.0f} | {rate('fixed', STREAMS):.0f} |",
        f"| transformers `generate`, one after another | {rate('transformers', 1):.0f} | |",
        f"| transformers `generate`, one batch | | {rate('transformers', STREAMS):.0f} |",
        "",
        f"- 1 stream: {ratio(1, 'default', 'transformers', 1)} transformers (target 1x)",
        f"- 16 streams: {ratio(STREAMS, 'default', 'transformers', 1)} one after another (target 5x)",
        f"- 16 streams: {ratio(STREAMS, 'default', 'transformers', STREAMS)} one batch (target 1.2x)",
        f"- `deterministic: true` at 1 stream: {ratio(1, 'fixed', 'default', 1)} the default's rate",
        f"- `deterministic: true` at 16 streams: {ratio(STREAMS, 'fixed', 'default', STREAMS)} the default's rate",
        f"- {100 * same:.1f} % of the tokens equal transformers' batch, place by place",
    ]
    (HERE / "ar_engine.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
