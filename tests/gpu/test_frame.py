"""The captured frame against transformers and against our own eager step, at the published shape."""

from pathlib import Path

import numpy as np
import pytest
import torch
from talkers import GREEDY, OTHERS, PUBLISHED_SAMPLING, TEXT, load, prompt, start

from omni_ray.models.qwen3_omni.talker import SUPPRESSED, Qwen3OmniTalker
from omni_ray.models.qwen3_omni.talker_input import TalkerPrompt

FRAMES = 20


def upstream_codes(talker: Qwen3OmniTalker, asked: TalkerPrompt) -> np.ndarray:
    """What transformers' ``generate`` of the talker gives for the same prompt and text: int64 [frames, codebooks]."""
    model, text, markers = talker._upstream, talker._text, talker._markers
    rows = talker.encode(asked)
    first = text[TEXT[0]] + talker._codec.weight[markers.codec_bos]
    stop = talker._stop
    result = model.generate(
        inputs_embeds=torch.cat((rows.embeds, first[None]))[None],
        trailing_text_hidden=text[[*TEXT[1:], markers.tts_eos]][None],
        tts_pad_embed=text[markers.tts_pad][None, None],
        talker_input_ids=torch.zeros(1, len(rows) + 1, dtype=torch.long, device="cuda"),
        attention_mask=torch.ones(1, len(rows) + 1, dtype=torch.long, device="cuda"),
        max_new_tokens=FRAMES + 1,
        do_sample=False,
        repetition_penalty=1.05,
        eos_token_id=stop,
        suppress_tokens=[i for i in range(3072 - SUPPRESSED, 3072) if i != stop],
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    codes = torch.stack([states[-1] for states in result.hidden_states if states[-1] is not None], 1)
    return codes[0].cpu().numpy()


def frames(talker: Qwen3OmniTalker, captured: bool, count: int = FRAMES) -> np.ndarray:
    step = talker.step if captured else talker.step_eagerly
    return np.stack([step([0], [frame]).frames[0].numpy() for frame in range(count)])


def test_codes_equal_transformers_in_float32(published: Path) -> None:
    talker = load(published, "float32", 2)
    asked = prompt(150)
    start(talker, 0, asked, GREEDY)
    captured = frames(talker, captured=True)
    start(talker, 0, asked, GREEDY)
    eager = frames(talker, captured=False)
    expected = upstream_codes(talker, asked)
    assert expected.shape == (FRAMES, 16)
    assert len(np.unique(expected)) > 50
    np.testing.assert_array_equal(eager, expected)
    np.testing.assert_array_equal(captured, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_over_an_8_bit_cache_are_close_to_the_eager_step_s(published: Path, dtype: str) -> None:
    """Of codebook 0, in the frame behind a first one, so that keys that the kernel wrote are read by it."""
    talker = load(published, dtype, 8, "fp8")
    slots = list(range(8))
    logits, codes = [], []
    last: torch.Tensor | None = None
    for step in (talker.step, talker.step_eagerly):
        for slot in slots:
            start(talker, slot, prompt(30 + 20 * slot), GREEDY)
        codes.append(step(slots, [0] * 8).frames)
        if last is None:
            last = talker._tables.last.clone()
        talker._tables.last.copy_(last)  # what follows another code is another frame
        evidence = step(slots, [1] * 8).evidence
        logits.append(talker._captured.graphs.program(8).logits.clone() if step == talker.step else evidence)
    ours, eager = logits[0], logits[1][:, : logits[0].shape[1]]
    assert ((ours - eager).norm(dim=1) / eager.norm(dim=1)).max() < (5e-3 if dtype == "float32" else 0.1)
    if dtype == "float32":
        assert (codes[0] == codes[1]).float().mean() > 0.9


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_codes_equal_the_eager_step_with_any_sampling(published: Path, rows: int) -> None:
    """Frames of rows at different lengths and frame numbers, drawn in every way; float32."""
    talker = load(published, "float32", 8)
    slots = list(range(0, 8, 8 // rows))[:rows]
    results = []
    for step in (talker.step, talker.step_eagerly):
        for slot in slots:
            start(talker, slot, prompt(20 + 37 * slot), OTHERS[slot % len(OTHERS)])
        step([slots[-1]], [0])
        results.append([step(slots, [k + (slot == slots[-1]) for slot in slots]) for k in range(6)])
    for ours, eager in zip(*results, strict=True):
        np.testing.assert_array_equal(ours.frames.numpy(), eager.frames.numpy())
        assert ours.ended == eager.ended
        assert all(ours.finite)


def test_logits_in_bfloat16_are_close_to_the_eager_step_s(published: Path) -> None:
    """Of codebook 0, 64 rows after prompts of different lengths."""
    talker = load(published, "bfloat16", 64)
    slots = list(range(64))
    for slot in slots:
        start(talker, slot, prompt(30 + slot), PUBLISHED_SAMPLING)
    talker.step(slots, [0] * 64)
    ours = talker._captured.graphs.program(64).logits.clone()
    for slot in slots:
        start(talker, slot, prompt(30 + slot), PUBLISHED_SAMPLING)
    eager = talker.step_eagerly(slots, [0] * 64).evidence[:, : ours.shape[1]]
    assert (ours - eager).norm() / eager.norm() < 0.05


def test_a_row_that_is_not_finite_is_told_and_harms_no_other(published: Path) -> None:
    talker = load(published, "bfloat16", 8)
    for slot in range(3):
        start(talker, slot, prompt(20), PUBLISHED_SAMPLING)
    expected = talker.step([0, 1, 2], [0, 0, 0]).frames
    for slot in range(3):
        start(talker, slot, prompt(20), PUBLISHED_SAMPLING)
    talker._prompts.flush()  # else the prompt is written over it
    talker._talker.keys.numbers[:, 1] = float("nan")
    done = talker.step([0, 1, 2], [0, 0, 0])
    assert done.finite == [True, False, True]
    assert torch.equal(done.frames[[0, 2]], expected[[0, 2]])
