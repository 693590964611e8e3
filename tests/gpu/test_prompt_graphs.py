"""Prompts through CUDA graphs, at the published shape: the KV that kernel by kernel gives, and the frames of it."""

from pathlib import Path

import pytest
import torch
from talkers import GREEDY, load, prompt, start

from omni_ray.models.qwen3_omni.talker import Qwen3OmniTalker


@pytest.fixture
def talker(published: Path) -> Qwen3OmniTalker:
    talker = load(published, "bfloat16", 4)
    assert talker._prompts is not None
    return talker


@pytest.mark.parametrize("length", [20, 120, 121, 200, 400])
def test_graphs_write_what_kernels_write(talker: Qwen3OmniTalker, length: int) -> None:
    decoder, graphs = talker._talker, talker._prompts
    asked = prompt(length)
    start(talker, 0, prompt(477), GREEDY)  # an earlier owner of the slots
    start(talker, 3, prompt(477), GREEDY)
    graphs.flush()
    start(talker, 1, prompt(30), GREEDY)  # one more in the pack
    start(talker, 0, asked, GREEDY)
    graphs.flush()
    talker._prompts = None
    start(talker, 3, asked, GREEDY)
    talker._prompts = graphs
    count = len(talker.encode(asked))
    for table in (decoder.keys, decoder.values):
        ours, theirs = table.numbers[:, 0, :, :count].float(), table.numbers[:, 3, :, :count].float()
        # experts are chosen alike but for ties; bfloat16 sums in another order
        assert ((ours - theirs).norm() / theirs.norm()).item() < 0.02


def test_a_graph_is_there_for_every_piece(talker: Qwen3OmniTalker) -> None:
    """Also for the last piece that fits, and for none beyond the cache."""
    decoder, graphs = talker._talker, talker._prompts
    rows = talker.encode(prompt(470))
    assert graphs.write(1, rows.embeds[:400], rows.axes[:, :400], 0)
    assert graphs.write(1, rows.embeds[:128], rows.axes[:, :128], decoder.length - 129)
    assert not graphs.write(1, rows.embeds[:129], rows.axes[:, :129], decoder.length - 128)
    torch.cuda.synchronize()
