"""The codec of hibari's latents: streaming inverse STFT, equal sample for sample to one call, whatever the chunks.

What hibari 0.2.1 does for a whole sentence in ``hibari.dsp.synth`` is done here row by row (MODEL-INV-003: the maths is
theirs; the differences are that rows may come in pieces, and that the noise is counter-based instead of a generator's
stream). A row is 12.5 ms: five spectra of 601 bins and a fundamental frequency, in ``BRANCHES`` order. Per row,

    S = exp(lh) e^(i pi tanh(theta)) STFT(pulse train of f0) + exp(ln) (complex normal) + exp(lr) e^(i phi)

and the sound is the inverse STFT (window 1200, hop 300, periodic Hann) of S. A sample needs the rows up to 4 after its
own: 2 for the overlap-add, 1 for the pulses under the last window, 1 for the interpolation of f0.

Bit-equality rests on three things: every FFT is one row's own, phase is summed within one row's 300 samples and carried
as a float64, and all else is elementwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine import noise
from omni_ray.engine.codec import Codec, DecodeItem
from omni_ray.engine.types import LatentChunk, Request
from omni_ray.errors import StageFailedError

SAMPLE_RATE: Final = 24000
HOP: Final = 300
"""Samples per row."""
ROWS_PER_SECOND: Final = SAMPLE_RATE // HOP
WINDOW: Final = 1200
BINS: Final = WINDOW // 2 + 1
BRANCHES: Final = ("lh", "theta", "ln", "lr", "phi")
"""A row's five spectra of ``BINS`` floats, in this order; after them comes f0 in Hz, below 40 where unvoiced."""
ROW_WIDTH: Final = len(BRANCHES) * BINS + 1
LOOKAHEAD_ROWS: Final = 4
"""Rows after a sample's own that it depends on."""
MAX_LOG: Final = 7.0
"""Log magnitudes are capped here, as hibari caps them."""

_OVERLAP: Final = WINDOW // HOP
VOICED_HZ: Final = 40.0
_HIGHEST_HARMONIC_HZ: Final = 11000.0
_HANN: Final = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)
_ANALYSIS: Final = _HANN / np.float32(WINDOW / 4)  # a cosine of amplitude 1 then peaks at 1
_WEIGHT: Final = (_HANN * _HANN).reshape(_OVERLAP, HOP)
_LATER: Final = (((np.arange(HOP) + 0.5) / HOP - 0.5) % 1.0).astype(np.float32)
"""Weight of the later of the two rows between which a sample's f0 is interpolated (rows sit at their middle)."""
_BIN: Final = np.arange(BINS)

Floats: TypeAlias = NDArray[np.float32]


def _zeros(*shape: int) -> Floats:
    return np.zeros(shape, np.float32)


@dataclass(frozen=True, slots=True)
class Segment:
    """What is carried from one piece of a segment's rows to the next. Never changed, only replaced.

    Attributes:
        framed: rows that became windowed frames.
        rows: float32 [n, ROW_WIDTH], the rows after them, and ``positions`` int64 [n], where their noise is drawn.
        f0: of the row before the next pulse block, of that block's own row, and of the rows after it; empty at first.
        phase: of the pulse train after the last pulse block, in periods, 0 <= phase < 1.
        pulses: float32 [n, HOP], pulse blocks from the left edge of the next frame on. Until ``padded``, the left
            padding is still missing, because it mirrors samples that have not come.
        frames: float32 [3, WINDOW], the last windowed frames; zeros before the first.
    """

    framed: int = 0
    rows: Floats = field(default_factory=lambda: _zeros(0, ROW_WIDTH))
    positions: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    f0: Floats = field(default_factory=lambda: _zeros(0))
    phase: float = 0.0
    pulses: Floats = field(default_factory=lambda: _zeros(0, HOP))
    padded: bool = False
    frames: Floats = field(default_factory=lambda: _zeros(_OVERLAP - 1, WINDOW))


@dataclass(slots=True)
class HibariState:
    """One request's state: the seed of its noise and the segment it is in."""

    seed: int
    segment: Segment = field(default_factory=Segment)


class HibariCodec(Codec):
    """Latent rows float32 [n, ROW_WIDTH] to mono 24 kHz samples, 300 per row. Segments follow each other plainly."""

    sample_rate = SAMPLE_RATE
    channels = 1
    streaming = "state"

    def load(self) -> None:
        """Nothing to load; one short synthesis plans the FFTs."""
        chunk = LatentChunk(0, np.zeros((2 * LOOKAHEAD_ROWS, ROW_WIDTH), np.float32), ends_segment=True)
        self.decode([DecodeItem(HibariState(seed=0), chunk, last=True)])

    def open(self, request: Request) -> HibariState:
        """State of a request none of whose rows has come."""
        return HibariState(request.seed)

    def decode(self, items: Sequence[DecodeItem]) -> list[Floats]:
        """See ``Codec.decode``. Work per item does not depend on the other items."""
        done = [_decode(item) for item in items]
        for item, (_, segment) in zip(items, done, strict=True):  # only now: a failed batch leaves no trace
            item.state.segment = segment
        return [samples for samples, _ in done]


def _decode(item: DecodeItem) -> tuple[Floats, Segment]:
    chunk, state = item.units, item.state
    if not isinstance(chunk, LatentChunk) or chunk.rows.ndim != 2 or chunk.rows.shape[1] != ROW_WIDTH:
        raise StageFailedError(f"code2wav takes latent rows of {ROW_WIDTH} numbers")
    ends = item.last or chunk.ends_segment
    samples, segment = advance(state.segment, chunk.rows, chunk.position, state.seed, ends)
    return samples, Segment() if ends else segment


def advance(segment: Segment, rows: Floats, position: int, seed: int, ends: bool) -> tuple[Floats, Segment]:
    """Take more rows of a segment; give the samples that became final.

    Args:
        segment: what the rows before left.
        rows: float32 [n, ROW_WIDTH], n >= 0.
        position: absolute index of the first row in the request; the noise is drawn there.
        seed: of the noise.
        ends: whether these are the segment's last rows; the rest of its samples then come too.

    Returns:
        Samples float32 [m], and what to give with the next rows.
    """
    waiting = np.ascontiguousarray(np.concatenate([segment.rows, rows]))  # strides may choose other last bits
    positions = np.concatenate([segment.positions, position + np.arange(len(rows))])
    if not len(waiting):
        return _zeros(0), segment
    new_pulses, f0, phase = _pulse_blocks(segment.f0, rows[:, -1], segment.phase, ends)
    pulses, padded = _pad(np.concatenate([segment.pulses, new_pulses]), segment.padded, ends)
    count = min(len(waiting), max(0, len(pulses) - (_OVERLAP - 1))) if padded else 0
    new_frames = _frames(waiting[:count], positions[:count], pulses, seed)
    frames = np.concatenate([segment.frames, new_frames])
    samples = _overlap_add(frames, segment.framed, ends)
    return samples, Segment(
        framed=segment.framed + count,
        rows=waiting[count:],
        positions=positions[count:],
        f0=f0,
        phase=phase,
        pulses=pulses[count:],
        padded=padded,
        frames=frames[count:],
    )


def _pulse_blocks(known: Floats, new: Floats, phase: float, ends: bool) -> tuple[Floats, Floats, float]:
    """The pulse train of every row whose neighbours' f0 is known: all harmonics below 11 kHz at amplitude 1.

    Dirichlet's kernel: sum over h = 1..H of cos(h t) = sin((H + 1/2) t) / (2 sin(t / 2)) - 1/2.

    Returns:
        Blocks float32 [n, HOP]; the f0 to carry; the phase to carry.
    """
    edge = [new[:1]] if not len(known) else [known]
    f0 = np.concatenate([*edge, new])
    if ends:
        f0 = np.concatenate([f0, f0[-1:]])
    count = max(0, len(f0) - 2)
    half, before, own, after = HOP // 2, f0[:count, None], f0[1 : count + 1, None], f0[2:, None]
    hz = np.empty((count, HOP), np.float32)
    hz[:, :half] = before * (1 - _LATER[:half]) + own * _LATER[:half]
    hz[:, half:] = own * (1 - _LATER[half:]) + after * _LATER[half:]
    voiced = hz > VOICED_HZ
    hz = np.maximum(hz, np.float32(VOICED_HZ))

    periods = np.cumsum(hz, axis=1, dtype=np.float64) / SAMPLE_RATE  # within each row: sums do not see the chunks
    starts = np.empty((count, 1), np.float64)
    for row in range(count):
        starts[row, 0] = phase
        phase = (phase + float(periods[row, -1])) % 1.0
    angle = ((starts + periods) % 1.0 * (2 * np.pi)).astype(np.float32)

    harmonics = np.floor(np.float32(_HIGHEST_HARMONIC_HZ) / hz) + np.float32(0.5)
    below = 2 * np.sin(angle * np.float32(0.5))
    peak = np.abs(below) <= np.float32(2e-3)  # 0 / 0 at a pulse; its limit is H + 1/2
    ratio = np.sin(harmonics * angle) / np.where(peak, np.float32(1), below)
    blocks = np.where(peak, harmonics, ratio) - np.float32(0.5)
    return np.where(voiced, blocks, np.float32(0)), f0[count:], phase


def _pad(blocks: Floats, padded: bool, ends: bool) -> tuple[Floats, bool]:
    """Mirror the pulses at the segment's two borders, as a centred STFT does, as far as they are known.

    Returns:
        Blocks from the next frame's left edge on, and whether the left padding is there.
    """
    flat, side = blocks.reshape(-1), WINDOW // 2
    if not padded and len(flat) <= side:
        if not ends:
            return blocks, False
        return np.pad(flat, side, mode="reflect").reshape(-1, HOP), True  # mirrored more than once
    parts = [flat]
    if not padded:
        parts.insert(0, flat[side:0:-1])
    if ends:
        parts.append(flat[-2 : -2 - HOP : -1])  # the last frame reaches one block beyond the last row
    return np.concatenate(parts).reshape(-1, HOP), True


def _frames(rows: Floats, positions: NDArray[np.int64], pulses: Floats, seed: int) -> Floats:
    """Rows [n, ROW_WIDTH] over pulse blocks [n + 3 or more, HOP] to windowed frames, float32 [n, WINDOW]."""
    if not len(rows):
        return _zeros(0, WINDOW)
    windows = np.lib.stride_tricks.sliding_window_view(pulses.reshape(-1), WINDOW)[::HOP][: len(rows)]
    spectrum = np.fft.rfft(windows * _ANALYSIS, axis=1)
    lh, theta, ln, lr, phi = (rows[:, i * BINS : (i + 1) * BINS] for i in range(len(BRANCHES)))
    spectrum *= _polar(lh, np.tanh(theta) * np.float32(np.pi))
    spectrum += noise.complex_normal(seed, positions[:, None], 0, _BIN) * _magnitude(ln)
    spectrum += _polar(lr, phi)
    return np.asarray(np.fft.irfft(spectrum, WINDOW, axis=1) * _HANN, np.float32)


def _magnitude(log: Floats) -> Floats:
    return np.asarray(np.exp(np.minimum(log, np.float32(MAX_LOG))), np.float32)


def _polar(log: Floats, angle: Floats) -> NDArray[np.complex64]:
    out = np.empty(angle.shape, np.complex64)
    magnitude = _magnitude(log)
    np.multiply(magnitude, np.cos(angle), out=out.real)
    np.multiply(magnitude, np.sin(angle), out=out.imag)
    return out


def _overlap_add(frames: Floats, framed: int, ends: bool) -> Floats:
    """Samples float32 [m] that no later frame changes.

    Args:
        frames: the 3 frames before, then the new ones [3 + n, WINDOW].
        framed: how many frames of the segment came before the new ones.
        ends: whether no frame follows.
    """
    index = np.arange(framed - (_OVERLAP - 1), framed - (_OVERLAP - 1) + len(frames) + 2)
    there = (index >= 0) & (index < index[0] + len(frames))
    if ends:
        frames = np.concatenate([frames, _zeros(2, WINDOW)])
    count = len(frames) - (_OVERLAP - 1)
    first = min(count, max(0, 2 - framed))  # blocks left of the segment's first sample
    parts = frames.reshape(-1, _OVERLAP, HOP)
    total, weight = _zeros(count - first, HOP), _zeros(count - first, HOP)
    for part in range(_OVERLAP):
        covering = slice(first + _OVERLAP - 1 - part, count + _OVERLAP - 1 - part)
        total += parts[covering, part]
        weight += there[covering, None] * _WEIGHT[part]
    samples: Floats = total / np.maximum(weight, np.float32(1e-11))
    return samples.reshape(-1)
