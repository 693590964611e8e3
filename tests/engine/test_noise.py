"""Philox against its published vectors, and what everything drawn from it promises."""

import numpy as np
import pytest

from omni_ray.engine import noise


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_random123_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert tuple(int(word) for word in noise.philox4x32(counter, key)) == expected


def test_coordinates_fill_key_and_counter_as_documented() -> None:
    seed, position = 0x299F31D0A4093822, 0x0370734413198A2E
    words = noise.philox(seed, position, 0x85A308D3, 0x243F6A88)
    assert tuple(int(word) for word in words) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_a_value_does_not_depend_on_what_is_drawn_beside_it() -> None:
    position = np.arange(40)[:, None, None]
    codebook = np.arange(3)[None, :, None]
    token = np.arange(50)
    everything = noise.gumbel(7, position, codebook, token)
    assert everything.shape == (40, 3, 50)
    assert everything.dtype == np.float32
    for at in [(0, 0, 0), (39, 2, 49), (17, 1, 23)]:
        assert everything[at] == noise.gumbel(7, at[0], at[1], at[2])


def test_every_coordinate_and_both_halves_of_seed_and_position_matter() -> None:
    draws = [
        noise.philox(*at)[0].item()
        for at in [(1, 2, 3, 4), (9, 2, 3, 4), (1 + 2**32, 2, 3, 4), (1, 5, 3, 4), (1, 2 + 2**32, 3, 4), (1, 2, 4, 3)]
    ]
    assert len(set(draws)) == len(draws)
    assert noise.philox(-1, 0, 0, 0)[0] == noise.philox(2**64 - 1, 0, 0, 0)[0]


def test_uniform_is_open_and_exact() -> None:
    values = noise.uniform(3, np.arange(200_000), 0, 0)
    assert values.dtype == np.float32
    assert values.min() > 0
    assert values.max() < 1
    assert np.all((values.astype(np.float64) * 2**24) % 2 == 1)
    assert abs(values.mean() - 0.5) < 0.003


def test_normal_and_gumbel_have_the_right_moments() -> None:
    position = np.arange(200_000)
    normal = noise.normal(3, position, 0, 0)
    gumbel = noise.gumbel(3, position, 0, 0)
    assert normal.dtype == gumbel.dtype == np.float32
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 1) < 0.01
    assert abs((normal**4).mean() - 3) < 0.1
    assert abs(gumbel.mean() - 0.5772) < 0.02
    assert abs(gumbel.var() - np.pi**2 / 6) < 0.05


def test_complex_normal_extends_normal_by_an_independent_part() -> None:
    position = np.arange(100_000)
    z = noise.complex_normal(3, position, 1, 2)
    assert z.dtype == np.complex64
    assert np.array_equal(z.real, noise.normal(3, position, 1, 2))
    assert abs(z.imag.std() - 1) < 0.01
    assert abs((z.real * z.imag).mean()) < 0.02


def test_seeds_may_be_an_array() -> None:
    seeds, positions, ids = [0, 7, -1, 2**64 - 5], [0, 1, 2**40, 3], [0, 5, 9, 2]
    wrapped = np.array([seed & noise.SEED_MASK for seed in seeds], np.uint64)
    drawn = noise.gumbel(wrapped, np.array(positions), 2, np.array(ids))
    rows = zip(seeds, positions, ids, strict=True)
    alone = [noise.gumbel(seed, position, 2, np.array([one]))[0] for seed, position, one in rows]
    assert drawn.tolist() == alone


def test_no_two_gumbels_differ_by_more_than_their_span() -> None:
    least, most = (-np.log(-np.log(noise._unit(np.array([word], np.uint32)))) for word in (0, 0xFFFFFFFF))
    assert 19 < (most - least)[0] < noise.GUMBEL_SPAN
