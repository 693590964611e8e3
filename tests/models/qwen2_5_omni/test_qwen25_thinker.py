"""The thinker equals transformers' ``generate`` token for token, and gives the rows that the talker hears."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from qwen25_upstream import CHATS, TOKENS, chat, upstream_inputs

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.base import EngineContext
from omni_ray.engine.options import AROptions
from omni_ray.engine.resume import Resume
from omni_ray.engine.types import Finish, LatentChunk, Output, PromptChunk, Request, TextChunk
from omni_ray.errors import InvalidRequestError
from omni_ray.models.qwen2_5_omni.latent_engine import LatentTextEngine
from omni_ray.models.qwen2_5_omni.pipeline import THINKER
from omni_ray.models.qwen2_5_omni.prompt import ChatPrompt
from omni_ray.models.qwen2_5_omni.thinker import Qwen2_5OmniThinker


def engine(directory: Path, **options: Any) -> LatentTextEngine:
    merged = AROptions(**{"max_num_seqs": 3, "max_model_len": 600, "threads": 1, "dtype": "float32", **options})
    context = EngineContext(THINKER, str(directory), Qwen2_5OmniThinker, merged, progress=lambda line: None)
    return LatentTextEngine(context)


async def answer(thinker: LatentTextEngine, prompt: ChatPrompt, resume: Resume | None = None, **sampling: Any) -> Any:
    async def asked() -> Any:
        yield prompt

    how = SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, **sampling})
    outputs: list[Output] = []
    async for output in thinker.generate(Request("r", seed=1, sampling=how), {"request": asked()}, resume):
        outputs.append(output)
    return outputs


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs if isinstance(output, TextChunk) for token in output.token_ids]


def rows(outputs: list[Output]) -> NDArray[np.float32]:
    found = [output for output in outputs if isinstance(output, LatentChunk)]
    assert [chunk.position for chunk in found] == [0, *range(len(found[0].rows), len(found[0].rows) + len(found) - 1)]
    return np.concatenate([chunk.rows for chunk in found])


@torch.no_grad()
def expected(upstream: Any, directory: Path, prompt: ChatPrompt, ids: tuple[int, ...]) -> Any:
    """Upstream's greedy answer, and the rows that its ``generate`` makes for the talker."""
    inputs = upstream_inputs(directory, prompt, ids)
    out = upstream.thinker.generate(
        **inputs, max_new_tokens=TOKENS, do_sample=False, output_hidden_states=True, return_dict_in_generate=True
    )
    first = out.hidden_states[0][0].clone()
    config = upstream.config.thinker_config
    first[torch.isin(inputs["input_ids"], torch.tensor([config.audio_token_id, config.image_token_id]))] = 0
    parts = [first + out.hidden_states[0][-1], *(step[0] + step[-1] for step in out.hidden_states[1:])]
    return out.sequences[0, len(ids) :].tolist(), torch.cat(parts, 1)[0].numpy()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_answers_and_rows_equal_upstream(deterministic: bool, tiny25: Path, upstream25: Any) -> None:
    pytest.importorskip("PIL")
    thinker = engine(tiny25, deterministic=deterministic)
    await thinker.start()
    try:
        for name, prompt in CHATS.items():
            outputs = await answer(thinker, prompt)
            asked = outputs[0]
            assert isinstance(asked, PromptChunk)
            text, latents = expected(upstream25, tiny25, prompt, asked.token_ids)
            assert tokens(outputs) == text, name
            ours = rows(outputs)
            assert ours.shape == latents.shape == (len(asked.token_ids) + TOKENS - 1, 32)
            assert np.abs(ours - latents).max() < 1e-5 * np.abs(latents).max()
            assert outputs[-1] == Finish("length", outputs[-1].usage)
            # A replica that goes on from five tokens, or from the end, gives all rows again.
            known = Resume(text=(TextChunk(0, "?", tuple(text[:5])),))
            over = Resume(text=(TextChunk(0, "?", tuple(text)),), finish=outputs[-1])
            for resume in (known, over) if name == "text" else ():
                again = await answer(thinker, prompt, resume)
                assert tokens(again) == text
                assert np.array_equal(rows(again), ours)
    finally:
        await thinker.stop()


async def test_ids_are_what_upstreams_processor_writes(tiny25: Path) -> None:
    """And what cannot be honoured is refused; a clip shorter than a token is heard."""
    from transformers import AutoTokenizer

    thinker = engine(tiny25)
    await thinker.start()
    try:
        prompt = chat(("system", "Say"), ("user", "a ", 32000, " b", 160, (60, 100)), ("tool", "21"))
        (asked, *_) = await answer(thinker, prompt)
        sounds = ("<|AUDIO|>" * 50, "<|AUDIO|>")
        text = (
            "<|im_start|>system\nSay<|im_end|>\n"
            f"<|im_start|>user\na <|audio_bos|>{sounds[0]}<|audio_eos|> b<|audio_bos|>{sounds[1]}<|audio_eos|>"
            f"<|vision_bos|>{'<|IMAGE|>' * 8}<|vision_eos|><|im_end|>\n"
            "<|im_start|>user\n<tool_response>\n21\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
        assert list(asked.token_ids) == AutoTokenizer.from_pretrained(tiny25)(text)["input_ids"]
        for wrong, says in (
            (chat(("user", 0)), "holds no samples"),
            (chat(("user", "a <|AUDIO|> b")), "reserved token"),
            (chat(("robot", "Hi")), "unknown role"),
            (chat(("user", 25 * 16000)), "25 s of audio; this server takes at most 24 s"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                await answer(thinker, wrong)
    finally:
        await thinker.stop()


async def test_without_audio_output_only_text_is_made(tiny25: Path, tmp_path: Path) -> None:
    """And the chat template is found in the file where published checkpoints keep it."""
    shutil.copytree(tiny25, tmp_path / "silent")
    config = json.loads((tiny25 / "config.json").read_text())
    (tmp_path / "silent/config.json").write_text(json.dumps({**config, "enable_audio_output": False}))
    template = (tmp_path / "silent/chat_template.jinja").read_text()
    (tmp_path / "silent/chat_template.jinja").unlink()
    (tmp_path / "silent/chat_template.json").write_text(json.dumps({"chat_template": template + "Yes, "}))
    thinker = engine(tmp_path / "silent")
    await thinker.start()
    try:
        outputs = await answer(thinker, CHATS["text"])
        assert {type(output) for output in outputs} == {PromptChunk, TextChunk, Finish}
        assert outputs[0].rows == 0
        assert b"".join(map(thinker._model.detokenize, outputs[0].token_ids[-6:])).endswith(b"Yes, ")
    finally:
        await thinker.stop()
