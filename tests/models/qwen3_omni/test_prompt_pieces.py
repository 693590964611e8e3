"""What a CUDA graph of a prompt's piece computes, run without a graph: the KV that ``SlotDecoder.write`` gives."""

from pathlib import Path

import pytest
import torch

from omni_ray.engine.base import EngineContext
from omni_ray.engine.prompt_graphs import PromptPiece
from omni_ray.engine.slot_decoder import SlotDecoder
from omni_ray.models.qwen3_omni.options import TalkerOptions
from omni_ray.models.qwen3_omni.pipeline import TALKER
from omni_ray.models.qwen3_omni.talker import Qwen3OmniTalker

SLOTS, LENGTH = 3, 200


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
    assert torch.equal(decoder.keys.numbers[..., :-1, :].nan_to_num(7), before[..., :-1, :].nan_to_num(7))
