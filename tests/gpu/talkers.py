"""A talker on the GPU, and requests for it."""

from pathlib import Path

import torch

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.base import EngineContext
from omni_ray.engine.types import Request
from omni_ray.models.qwen3_omni.options import TalkerOptions
from omni_ray.models.qwen3_omni.pipeline import TALKER
from omni_ray.models.qwen3_omni.talker import Qwen3OmniTalker
from omni_ray.models.qwen3_omni.talker_input import TalkerPrompt, TalkerText

GREEDY = SamplingParams(temperature=0, repetition_penalty=1.05)
PUBLISHED_SAMPLING = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05)
OTHERS = (
    GREEDY,
    PUBLISHED_SAMPLING,
    SamplingParams(temperature=1.3, top_p=0.7, top_k=20),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=300, repetition_penalty=1.3),
)
TEXT = tuple(range(2000, 2012))


def context(directory: Path, dtype: str, rows: int, kv_cache_dtype: str = "auto") -> EngineContext:
    options = TalkerOptions(max_num_seqs=rows, max_model_len=512, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    return EngineContext(TALKER, str(directory), Qwen3OmniTalker, options, "dummy", lambda line: None)


def load(directory: Path, dtype: str, rows: int, kv_cache_dtype: str = "auto") -> Qwen3OmniTalker:
    torch.manual_seed(0)
    talker = Qwen3OmniTalker(context(directory, dtype, rows, kv_cache_dtype))
    talker.load()
    talker.captures.wait()  # frames and prompts by the same graphs every time, and none half captured when a test ends
    return talker


def prompt(length: int, first: int = 3000) -> TalkerPrompt:
    """A user turn of ``length`` ids, then the assistant's line."""
    return TalkerPrompt((151644, 872, *range(first, first + length), 151644, 77091, 198))


def start(talker: Qwen3OmniTalker, slot: int, asked: TalkerPrompt, sampling: SamplingParams) -> None:
    """All of the prompt, the text and its end."""
    rows = talker.encode(asked)
    talker.begin(slot, rows)
    chunk = talker.prefill_chunk
    for begin in range(0, len(rows), chunk):
        talker.prefill(slot, rows[begin : begin + chunk], begin)
    talker.sample_as(slot, Request(str(slot), seed=slot + (slot << 40), sampling=sampling))
    talker.feed(slot, TalkerText(TEXT))
    talker.end_feed(slot)
