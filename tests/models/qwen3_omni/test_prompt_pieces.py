"""What CUDA graphs of prompts compute, run without graphs: the KV that ``SlotDecoder.write`` gives."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from omni_ray.engine import prompt_graphs
from omni_ray.engine.base import EngineContext
from omni_ray.engine.capture import Captures
from omni_ray.engine.prompt_graphs import CHUNK, Beginning, PromptGraphs, PromptPack, PromptPiece
from omni_ray.engine.slot_decoder import SlotDecoder
from omni_ray.models.qwen3_omni.options import TalkerOptions
from omni_ray.models.qwen3_omni.pipeline import TALKER
from omni_ray.models.qwen3_omni.talker import Qwen3OmniTalker

SLOTS, LENGTH = 4, 1000


@pytest.fixture(scope="module")
def decoder(tiny_checkpoint: Path) -> SlotDecoder:
    options = TalkerOptions(max_num_seqs=SLOTS, max_model_len=LENGTH, dtype="float32", threads=1)
    talker = Qwen3OmniTalker(EngineContext(TALKER, str(tiny_checkpoint), Qwen3OmniTalker, options))
    with torch.inference_mode():
        talker.load()
    return talker._talker


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [(5,), (32, 7), (64, 64, 33)], ids=str)
def test_pieces_are_written_as_without_graphs(decoder: SlotDecoder, lengths: tuple[int, ...]) -> None:
    """Pieces behind each other, over what earlier owners left in the slots: not numbers, at worst."""
    size, count = 64, sum(lengths)
    prompt = torch.randn(count, decoder.hidden, generator=torch.Generator().manual_seed(count))
    axes = torch.arange(count).float().expand(3, -1)
    piece = PromptPiece(decoder, size, decoder.length)
    for table in (decoder.keys.numbers, decoder.values.numbers):
        table.fill_(torch.nan)
    start = 0
    for length in lengths:
        part, where = prompt[start : start + length], axes[:, start : start + length]
        decoder.write(0, part, where, start, fixed=False)
        piece.fill(2, part, where, start)
        piece.run()
        start += length
    for table in (decoder.keys.numbers, decoder.values.numbers):
        assert not table[:, 0, :, :count].isnan().any()
        torch.testing.assert_close(table[:, 2, :, :count], table[:, 0, :, :count], rtol=0, atol=1e-5)
        assert table[:, 1].isnan().all()
        assert table[:, 2, :, count:-1].isnan().all()


@torch.inference_mode()
def test_a_piece_that_was_never_filled_writes_only_where_nobody_looks(decoder: SlotDecoder) -> None:
    before = decoder.keys.numbers.clone()
    PromptPiece(decoder, 32, 64).run()
    PromptPack(decoder, 32).run()
    assert torch.equal(decoder.keys.numbers[..., :-1, :].nan_to_num(7), before[..., :-1, :].nan_to_num(7))


@torch.inference_mode()
def test_numbers_that_are_none_stay_in_the_slot_of_their_prompt(decoder: SlotDecoder) -> None:
    """Also when the pack is filled again, with less: they are in its padding then."""
    axes, pack = torch.arange(20).float().expand(3, -1), PromptPack(decoder, 64)
    good, bad = (torch.randn(20, decoder.hidden, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    bad[3, 5], bad[9, 0] = torch.nan, torch.inf
    decoder.write(3, good, axes, 0, fixed=False)
    tables = (decoder.keys.numbers, decoder.values.numbers)
    for prompts in ((Beginning(1, bad, axes), Beginning(0, good, axes)), (Beginning(2, good[:9], axes[:, :9]),)):
        pack.fill(prompts)
        pack.run()
    for table in tables:
        torch.testing.assert_close(table[:, 0, :, :20], table[:, 3, :, :20], rtol=0, atol=1e-5)
        torch.testing.assert_close(table[:, 2, :, :9], table[:, 3, :, :9], rtol=0, atol=1e-5)
        assert table[:, 1, :, 3].isnan().all()
        assert table[:, 1, :, 9].isnan().all()


class _NoGraph:
    """Stands for a CUDA graph: computes when it is replayed."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


@torch.inference_mode()
def test_prompts_are_packed_and_go_on(decoder: SlotDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginnings of three prompts, one of which ends further on, one that is given up, and one that fits no more."""
    monkeypatch.setattr(prompt_graphs, "captured", _NoGraph)
    captures = Captures()
    graphs = PromptGraphs(decoder, captures)
    captures.wait()
    lengths = {0: 130, 1: CHUNK + 40, 2: 77}
    for table in (decoder.keys.numbers, decoder.values.numbers):
        table.fill_(torch.nan)
    prompts = {slot: torch.randn(count, decoder.hidden) for slot, count in lengths.items()}
    axes = torch.arange(LENGTH).float().expand(3, -1)
    expected = {}
    for slot, prompt in prompts.items():
        decoder.write(3, prompt, axes[:, : len(prompt)], 0, fixed=False)
        tables = (decoder.keys.numbers, decoder.values.numbers)
        expected[slot] = [table[:, 3, :, : len(prompt)].clone() for table in tables]
    assert graphs.write(2, torch.full((9, decoder.hidden), torch.nan), axes[:, :9], 0)
    graphs.drop(2)
    for slot in (0, 2, 1):
        assert graphs.write(slot, prompts[slot][:CHUNK], axes[:, : min(CHUNK, lengths[slot])], 0)
    assert decoder.keys.numbers[:, 0, :, : lengths[0]].isfinite().all(), "the third fits no more: two are computed"
    assert decoder.keys.numbers[:, 1].isnan().all(), "the third is held back"
    assert graphs.write(1, prompts[1][CHUNK:], axes[:, CHUNK : lengths[1]], CHUNK)
    for slot, tables in expected.items():
        for ours, theirs in zip((decoder.keys.numbers, decoder.values.numbers), tables, strict=True):
            torch.testing.assert_close(ours[:, slot, :, : lengths[slot]], theirs, rtol=0, atol=1e-5)
            assert ours[:, slot, :, lengths[slot] : -1].isnan().all()
    assert not graphs.write(1, prompts[1], axes[:, : lengths[1]], 0), "too long for any graph"
