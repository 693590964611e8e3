"""The torch noise equals the numpy noise; the vectorised sampler equals the scalar one, row by row."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine import noise, torch_noise
from omni_ray.engine.sampler import CANDIDATES, Sampler
from omni_ray.engine.sampler import draw as draw_in_numpy
from omni_ray.engine.torch_sampler import RowSampling, draw, penalise
from omni_ray.engine.types import Request

SEEDS = [0, 1, 7, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -1, 123456789012345]
POSITIONS = [0, 1, 4095, 2**31 - 1, 2**32, 2**40 + 3, 5, 6, 7, 8]
IDS = np.concatenate([np.arange(40), [2047, 3071, 152063, 2**31, 2**32 - 1]])


def coordinates() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seeds = torch.tensor([torch_noise.signed(seed) for seed in SEEDS])
    return seeds, torch.tensor(POSITIONS), torch.from_numpy(IDS)


@pytest.mark.parametrize("codebook", [0, 1, 15, 2**32 - 1])
def test_words_and_uniforms_are_bit_equal(codebook: int) -> None:
    words = torch_noise.philox(*coordinates()[:2], codebook, coordinates()[2])
    uniform = torch_noise.uniform(*coordinates()[:2], codebook, coordinates()[2])
    for row, (seed, position) in enumerate(zip(SEEDS, POSITIONS, strict=True)):
        for ours, theirs in zip(words, noise.philox(seed, position, codebook, IDS), strict=True):
            np.testing.assert_array_equal(ours[row].numpy(), theirs.astype(np.int64))
        np.testing.assert_array_equal(uniform[row].numpy(), noise.uniform(seed, position, codebook, IDS))


def test_known_answer() -> None:
    """Random123's known answer for all-ones input, through the coordinates."""
    ones = torch.tensor([-1])
    words = torch_noise.philox(ones, ones, 2**32 - 1, torch.tensor([2**32 - 1]))
    assert [hex(int(word)) for word in words] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


def test_gumbels_are_equal_to_the_last_bit_but_one() -> None:
    seeds, positions, ids = coordinates()
    ours = torch_noise.gumbel(seeds, positions, 3, ids)
    for row, (seed, position) in enumerate(zip(SEEDS, POSITIONS, strict=True)):
        np.testing.assert_allclose(ours[row].numpy(), noise.gumbel(seed, position, 3, IDS), rtol=1e-6, atol=1e-6)


def test_a_row_s_noise_does_not_depend_on_its_place() -> None:
    ids = torch.arange(50)
    alone = torch_noise.gumbel(torch.tensor([9]), torch.tensor([4]), 2, ids)
    for rows in (2, 3, 17):
        crowd = torch_noise.gumbel(torch.full((rows,), 9), torch.full((rows,), 4), 2, ids)
        assert all(torch.equal(row, alone[0]) for row in crowd)


def row_sampling(samplers: list[Sampler]) -> RowSampling:
    rows = RowSampling.empty(len(samplers), torch.device("cpu"))
    for row, sampler in enumerate(samplers):
        params = SamplingParams(
            temperature=sampler.temperature,
            top_k=sampler.top_k,
            top_p=sampler.top_p,
            repetition_penalty=sampler.repetition_penalty,
        )
        rows.set(row, Request("r", sampler.seed, sampling=params))
    return rows


def test_rows_draw_what_the_scalar_sampler_draws() -> None:
    samplers = [
        Sampler(seed=1, temperature=0),
        Sampler(seed=2, temperature=0.9, top_k=50),
        Sampler(seed=-3, temperature=1.0, top_k=50, top_p=0.8),
        Sampler(seed=4, temperature=0.9, top_k=50, repetition_penalty=1.05),
        Sampler(seed=5, temperature=1.7, top_p=0.5),
        Sampler(seed=2**64 - 5, temperature=1.0),
        Sampler(seed=6, temperature=0.1, top_k=1),
        Sampler(seed=7, temperature=0, repetition_penalty=1.3),
    ]
    rows = row_sampling(samplers)
    generator = torch.Generator().manual_seed(0)
    seen = torch.zeros(len(samplers), 300, dtype=torch.bool)
    history: list[list[int]] = [[] for _ in samplers]
    for position in range(60):
        logits = torch.randn(len(samplers), 300, generator=generator) * 2
        drawn = draw(penalise(logits, seen, rows.penalty), rows, torch.full((8,), position), 0, CANDIDATES).tolist()
        penalised = [
            one.penalised(logits[row], torch.tensor(history[row], dtype=torch.int64))
            for row, one in enumerate(samplers)
        ]
        assert drawn == draw_in_numpy(torch.stack(penalised), samplers, [position] * 8)
        for row, token in enumerate(drawn):
            seen[row, token] = True
            history[row].append(token)


def test_fewer_candidates_change_nothing() -> None:
    rows = row_sampling([Sampler(seed=1, temperature=1, top_k=20), Sampler(seed=2, temperature=1, top_k=50, top_p=0.9)])
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(1))
    for position in range(50):
        where = torch.full((2,), position)
        assert torch.equal(draw(logits, rows, where, 3, 50), draw(logits, rows, where, 3, CANDIDATES))


def test_each_codebook_has_its_own_noise() -> None:
    rows = row_sampling([Sampler(seed=1, temperature=1)])
    flat = torch.zeros(1, 64)
    drawn = [int(draw(flat, rows, torch.tensor([0]), codebook, 64)) for codebook in range(16)]
    assert len(set(drawn)) > 8


def test_following_rows_are_greedy_with_their_leader() -> None:
    rows = row_sampling([Sampler(seed=1, temperature=0), Sampler(seed=2, temperature=0.3)]).following(50, 0.8)
    assert rows.temperature.tolist() == [0.0, 1.0]
    assert rows.top_k.tolist() == [50, 50]
    assert replace(rows, seed=rows.seed).seed.tolist() == [1, 2]
