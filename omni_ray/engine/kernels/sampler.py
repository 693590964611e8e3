"""Draws one code per row by the row's own parameters, and starts what comes next: rules of ``engine.torch_sampler``.

One program per row; nothing is sorted. A bisection over the logits' values finds a threshold that at least ``top_k``
and at most ``CANDIDATES`` of them exceed. Those few are gathered; among them each one counts who is larger (of equal
logits the lower id is), which gives ranks and the shares that ``top_p`` asks for, and only they need noise.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_ray.engine.kernels.launch import following, turn
from omni_ray.engine.kernels.rows import RESULT_EXTRA, ROW_WORDS
from omni_ray.engine.kernels.select import CANDIDATES, ID_BITS, draw_among_all, draw_among_few

MAX_VOCABULARY: Final = 1 << ID_BITS


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a frame's draws share, for M rows of a table of slots.

    Attributes:
        rows: int32 [M, ROW_WORDS].
        results: int32 [M, codebooks + RESULT_EXTRA].
        sums: float32 [M, H], the frame's embeddings so far.
        last: [slots, H], where a finished frame's sum goes.
        logits: float32 [M, CANDIDATES], scratch.
        ids: int32 [M, CANDIDATES], scratch.
    """

    rows: Tensor
    results: Tensor
    sums: Tensor
    last: Tensor
    logits: Tensor
    ids: Tensor

    @classmethod
    def of(cls, rows: Tensor, results: Tensor, last: Tensor) -> "Drawing":
        """With buffers of its own for the rest."""
        m, device = len(rows), rows.device
        return cls(
            rows,
            results,
            torch.empty(m, last.shape[1], device=device),
            last,
            torch.empty(m, CANDIDATES, device=device),
            torch.empty(m, CANDIDATES, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class FirstCode:
    """What the draw of codebook 0 needs beside logits.

    Attributes:
        said: uint8 [slots, V], codes of each slot so far; the new one is added.
        suppressed: uint8 [V], ids that are never drawn.
        stop: the code that ends an answer.
        embedding: [V, H].
        gain, eps: of the talker's last norm.
    """

    said: Tensor
    suppressed: Tensor
    stop: int
    embedding: Tensor
    gain: Tensor
    eps: float


def draw_first(logits: Tensor, drawing: Drawing, how: FirstCode, hidden: Tensor, pairs: Tensor) -> None:
    """Draw codebook 0 and lay out the predictor's first two positions.

    Args:
        logits: float32 [M, V].
        drawing: ``sums`` is set to the code's embedding.
        how: see there.
        hidden: [M, H], the talker's last state before its norm.
        pairs: [2 M, H]: of each row the normed state, then the code's embedding.
    """
    _launch(
        logits, drawing, how.embedding, pairs, how.said, how.suppressed, hidden, how.gain, how.eps, how.stop, 0, 0, 0.0
    )


def draw_next(
    logits: Tensor, drawing: Drawing, codebook: int, top_k: int, top_p: float, embedding: Tensor, x: Tensor
) -> None:
    """Draw another codebook at temperature 1, greedily where codebook 0 is; the last one ends the frame.

    Args:
        logits: float32 [M, V].
        drawing: the code's embedding is added to ``sums``; after the last codebook they become ``last``.
        codebook: from 1.
        top_k: ids that may be drawn, at most ``CANDIDATES``.
        top_p: of those.
        embedding: [V, H] of this codebook.
        x: [M, H], the predictor's next input; not written by the last codebook.
    """
    assert codebook > 0
    assert 0 < top_k <= CANDIDATES
    rows = drawing.rows  # in place of what only codebook 0 needs
    _launch(logits, drawing, embedding, x, rows, rows, x, x, 0.0, 0, codebook, top_k, top_p)


def _launch(
    logits: Tensor, drawing: Drawing, embedding: Tensor, x: Tensor, said: Tensor, suppressed: Tensor, hidden: Tensor,
    gain: Tensor, eps: float, stop: int, codebook: int, top_k: int, top_p: float,
) -> None:  # fmt: skip
    (m, vocabulary), hidden_size = logits.shape, embedding.shape[1]
    codes = drawing.results.shape[1] - RESULT_EXTRA
    assert vocabulary <= MAX_VOCABULARY
    _draw[(m,)](
        logits, drawing.rows, drawing.results, drawing.sums, drawing.last, drawing.logits, drawing.ids, embedding, x,
        said, suppressed, hidden, gain, eps, stop, codebook, top_k, top_p,
        V=vocabulary, CODES=codes, H=hidden_size, FIRST=codebook == 0, FINAL=codebook == codes - 1,
        WORDS=ROW_WORDS, FEW=CANDIDATES, BLOCK=triton.next_power_of_2(vocabulary),
        BLOCK_H=triton.next_power_of_2(hidden_size), num_warps=4, **following(logits),
    )  # fmt: skip


@triton.jit(do_not_specialize=["stop", "codebook", "top_k"])
def _draw(
    logits, rows, results, sums, last, few_logits, few_ids, embedding, x, said, suppressed, hidden, gain, eps, stop,
    codebook, top_k, top_p,
    V: tl.constexpr, CODES: tl.constexpr, H: tl.constexpr, FIRST: tl.constexpr, FINAL: tl.constexpr,
    WORDS: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    row = rows + m * WORDS
    results += m * (CODES + 2)
    ids, h = tl.arange(0, BLOCK), tl.arange(0, BLOCK_H)
    inside, wide = ids < V, h < H
    turn(PDL)
    slot = tl.load(row)
    active, place = slot >= 0, tl.maximum(slot, 0).to(tl.int64)
    heat = tl.load(row + 7).to(tl.float32, bitcast=True)
    seed_low, seed_high, frame = tl.load(row + 5), tl.load(row + 6), tl.load(row + 2)
    z = tl.load(logits + m * V + ids, mask=inside, other=0.0)
    if not FIRST:
        summed = tl.load(sums + m * H + h, mask=wide, other=0.0)
    finite = tl.sum(tl.where(z - z == 0.0, 0, 1), 0) == 0
    if FIRST:
        penalty = tl.load(row + 10).to(tl.float32, bitcast=True)
        seen = tl.load(said + place * V + ids, mask=inside & active, other=0) != 0
        z = tl.where(seen, tl.where(z > 0, z / penalty, z * penalty), z)
        z = tl.where(tl.load(suppressed + ids, mask=inside, other=1) != 0, -float("inf"), z)
        top_k = tl.minimum(tl.load(row + 8), V)
        top_p = tl.load(row + 9).to(tl.float32, bitcast=True)
    z = tl.where(inside & (z == z), z, -float("inf"))
    if heat > 0:
        if not FIRST:
            heat = 1.0
        if FIRST and top_k > FEW:
            code = draw_among_all(z, ids, inside, top_k, top_p, heat, seed_low, seed_high, frame, codebook, V)
        else:
            code = draw_among_few(
                z, ids, few_logits + m * FEW, few_ids + m * FEW, top_k, top_p, heat, seed_low, seed_high, frame,
                codebook, FEW,
            )  # fmt: skip
    else:
        code = tl.argmax(z, 0).to(tl.int32)
    code = tl.minimum(tl.maximum(code, 0), V - 1)  # of numbers that are none, any
    tl.store(results + codebook, code)

    vector = tl.load(embedding + code.to(tl.int64) * H + h, mask=wide, other=0.0)
    if FIRST:
        tl.store(results + CODES, (code == stop).to(tl.int32))
        tl.store(results + CODES + 1, finite.to(tl.int32))
        tl.store(said + place * V + code, 1, mask=active)
        state = tl.load(hidden + m * H + h, mask=wide, other=0.0).to(tl.float32)
        state *= tl.rsqrt(tl.sum(state * state, 0) / H + eps)
        state *= tl.load(gain + h, mask=wide, other=0.0).to(tl.float32)
        tl.store(x + 2 * m * H + h, state.to(x.dtype.element_ty), mask=wide)
        tl.store(x + (2 * m + 1) * H + h, vector, mask=wide)
        tl.store(sums + m * H + h, vector.to(tl.float32), mask=wide)
    else:
        if not finite:
            tl.store(results + CODES + 1, 0)
        summed += vector.to(tl.float32)
        if FINAL:
            tl.store(last + place * H + h, summed.to(last.dtype.element_ty), mask=wide & active)
        else:
            tl.store(sums + m * H + h, summed, mask=wide)
            tl.store(x + m * H + h, vector, mask=wide)
