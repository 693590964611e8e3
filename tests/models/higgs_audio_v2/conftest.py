"""The tiny Higgs Audio v2 checkpoint, and transformers' own answers on it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from omni_ray.models.higgs_audio_v2.checkpoint import AUDIO, CODES, DELAY, make_tiny

WORDS = "Ah, so it is."
HEAD = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nGenerate audio following instruction.\n\n"
    "<|scene_desc_start|>\nAudio is recorded from a quiet room.\n<|scene_desc_end|><|eot_id|>"
)
USER = "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
Codes = NDArray[np.int64]
Generate = Callable[..., Codes]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("higgs") / "tiny"
    make_tiny(path)
    return path


@pytest.fixture(scope="session")
def upstream(tiny: Path) -> Any:
    from transformers import HiggsAudioV2ForConditionalGeneration

    return HiggsAudioV2ForConditionalGeneration.from_pretrained(tiny).eval()


@pytest.fixture(scope="session")
def generate(tiny: Path, upstream: Any) -> Generate:
    """``generate(text, rows, said)``: greedy rows int64 [n, codebooks] by transformers' ``generate``.

    ``said`` are code frames [n, codebooks] of ``WORDS`` spoken before, which upstream's processor puts in the prompt as
    here: its own build_delay_pattern, which needs none of the codec, and the text of its chat template. The first row
    (all begin codes) and the row that ends the answer are left out.
    """
    from transformers import AutoTokenizer, HiggsAudioV2Processor

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    delay: Any = object.__new__(HiggsAudioV2Processor)
    delay.audio_stream_bos_id, delay.audio_stream_eos_id = CODES, CODES + 1

    def run(text: str, rows: int, said: Codes | None = None) -> Codes:
        prompt, more = HEAD, {}
        if said is not None:
            framed = np.pad(said.T, ((0, 0), (1, 1)), constant_values=((0, 0), (CODES, CODES + 1)))
            pattern = delay.build_delay_pattern(torch.from_numpy(framed)[None])[0].T[None]
            mark = AUDIO * (pattern.shape[1] - 7) + DELAY * 7
            prompt += f"{USER.format(WORDS)}<|audio_out_bos|>{mark}<|audio_eos|><|eot_id|>"
            more = {"audio_input_ids": pattern, "audio_input_ids_mask": torch.ones(pattern.shape[:2], dtype=torch.bool)}
        prompt += f"{USER.format(text)}<|audio_out_bos|>"
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            made = upstream.generate(**ids, **more, do_sample=False, max_new_tokens=rows + 1)[0].numpy()
        made = made[0 if said is None else more["audio_input_ids"].shape[1] :]
        assert (made[0] == CODES).all()
        ends = (made == CODES + 1).all(-1).nonzero()[0]
        return made[1 : ends[0] if len(ends) else None]

    return run
