"""The process that ``vllm_rehearsal`` starts: computes every kind of step with one layer of a model, and ends."""

import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from vllm import LLM, TokensPrompt

from omni_ray.engine.vllm_rehearsal import OneLayer
from omni_ray.engine.vllm_sampling import vllm_sampling
from omni_ray.engine.vllm_start import import_model
from omni_ray.engine.vllm_warm_up import RandomPrompts, warm_up_lengths, warm_up_steps

NICE: Final = 5
"""Where cores are few, they are the model's own first."""


def main(began: float) -> None:
    """Compute what a JSON ``OneLayer`` on standard input says; the last line printed says what that was.

    Args:
        began: when this process did, of ``time.monotonic``.
    """
    os.nice(NICE)
    asked = OneLayer.model_validate_json(sys.stdin.buffer.read())
    import_model(Path(asked.arguments["model"]), None)
    llm = LLM(**asked.arguments, hf_overrides=_one_layer)
    model, scheduler = llm.llm_engine.vllm_config.model_config, llm.llm_engine.vllm_config.scheduler_config
    # all lengths, longest first: that is the order in which the model's start comes to need their kernels
    lengths = warm_up_lengths(min(scheduler.max_num_batched_tokens, model.max_model_len - 1), 0)[::-1]
    steps = warm_up_steps(lengths, scheduler.max_num_seqs, asked.sampling)
    prompts = RandomPrompts(lambda _: b"?", model.get_vocab_size())
    for step in steps:
        llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompts.ids(prompt.length))) for prompt in step],
            [vllm_sampling(prompt.sampling, 0, prompt.limit, ()) for prompt in step],
            use_tqdm=False,
        )
    seconds = time.monotonic() - began
    print(f"one layer computed {sum(map(len, steps))} prompts beside the start, in {seconds:.1f} s", flush=True)
    os._exit(0)  # nothing is left to be put in order, which would take seconds


def _one_layer(config: Any) -> Any:
    """``config``, the one of transformers that vLLM has read, with one layer."""
    config.get_text_config().num_hidden_layers = 1
    return config
