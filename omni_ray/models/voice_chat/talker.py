"""The talker: hibari's network, from clauses of text to latent rows, one call per spoken segment.

Imports hibari only in ``load``. hibari 0.2.1's own documented split of text into phoneme strings is used as it is
(MODEL-INV-003); what differs from ``Hibari.__call__``: rows instead of sound, silence shortened, and exact ``speed``.
"""

import hashlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.per_request import PerRequestModel
from omni_ray.engine.resume import Resume
from omni_ray.engine.threads import Threads
from omni_ray.engine.types import Finish, FinishReason, LatentChunk, Output, Request, Usage
from omni_ray.errors import ConfigError, InvalidRequestError
from omni_ray.models.voice_chat.clauses import speakable
from omni_ray.models.voice_chat.code2wav import (
    BINS,
    BRANCHES,
    LOOKAHEAD_ROWS,
    MAX_LOG,
    ROW_WIDTH,
    ROWS_PER_SECOND,
    VOICED_HZ,
)

VOICE: Final = "heart"
"""The one voice inside the package; hibari would download any other."""
ONNX_SHA256: Final = "5f70741d4e900f4e85d0037498736cc1b3e1b9a63a13546a5da1e63abf4fccd8"
LATENT_ROWS: Final = 80
"""Rows of one output chunk: a second of speech, 0.96 MB."""
MAX_PHONEMES: Final = 400
"""Longest phoneme string per call: hibari's own limit where a sentence has clause punctuation, held everywhere here."""

SILENCE_DB: Final = -60.0
"""A row this far below the segment's loudest one is silent (its sound is near -80 dB of full scale)."""
LEAD_ROWS: Final = 2
"""Silent rows kept in front of a segment; hibari makes about 20, a quarter of a second before the first sound."""
PAUSE_ROWS: Final = 4
"""Silent rows kept after a segment that ends at a comma, say: with the sounds' own decay, 0.3 s until the next one."""
BREAK_ROWS: Final = 0
"""Silent rows kept after a segment that was cut between two words. After a sentence or line hibari's pause stays."""

SPEED_TOLERANCE: Final = 0.03
"""Durations closer than this to ``1 / speed`` are left as the network made them."""
MODEL_SPEEDS: Final = (0.2, 1.3)
"""Speeds asked of the network; the rest is done by leaving out rows. Whisper's word errors at speed 2 (7 texts, 102
words): 37 % with a limit of 2.0, 34 % with 1.6, 11 % with 1.3, 23 % with 1.0: short phonemes vanish beyond it."""
SPEED_CALLS: Final = 4
"""Calls spent on finding the speed at which the network's rounded durations add up to what was asked."""

Rows: TypeAlias = NDArray[np.float32]


class HibariTalker(PerRequestModel):
    """Clauses in; latent rows float32 [n, ROW_WIDTH] out, a segment per phoneme string.

    Rows are a function of the clauses alone, and a hundred times faster made than heard: a request that goes on after
    its replica died is spoken again from its first clause.
    """

    resumable = "replay"

    def load(self) -> None:
        """Build hibari, check its weights, and warm up.

        Raises:
            ConfigError: the onnx file is not the one of hibari-tts 0.2.1.
        """
        from hibari import Hibari

        self._hibari: Any = Hibari(voice=VOICE, threads=1)
        path = Path(self._hibari.model_path)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != ONNX_SHA256:
            raise ConfigError([f"stage {self.context.stage.name!r}: {path} has sha256 {found}, not {ONNX_SHA256}"])
        self._outputs = [*BRANCHES, "f0"]
        self._rows(self._phonemes("Hello, this is a test.")[0], 1.0, False)

    async def generate(
        self,
        request: Request,
        inputs: Mapping[str, AsyncGenerator[Any, None]],
        threads: Threads,
        resume: Resume | None = None,
    ) -> AsyncGenerator[Output, None]:
        """See ``PerRequestModel.generate``. Inputs are ``Clause``; ``Usage`` counts spoken clauses and rows.

        Stops a codec's lookahead beyond ``max_audio_seconds``, so that the codec can cut there exactly.
        """
        if request.voice not in (None, VOICE):
            raise InvalidRequestError(f"voice {request.voice!r} is unknown; the only voice is {VOICE!r}", "voice")
        left = int(np.ceil(request.max_audio_seconds * ROWS_PER_SECOND)) + LOOKAHEAD_ROWS
        position = segment = clauses = 0
        reason: FinishReason = "stop"
        (source,) = inputs.values()
        async with aclosing(source) as stream:
            async for clause in stream:
                strings = await threads.run(self._phonemes, clause.text)
                clauses += bool(strings)
                for index, string in enumerate(strings, 1):
                    ends_line = index == len(strings) and clause.text.endswith("\n")
                    rows = await threads.run(self._rows, string, request.speed, ends_line)
                    if len(rows) > left:
                        rows, reason = rows[:left], "length"
                    for start in range(0, len(rows), LATENT_ROWS):
                        piece = rows[start : start + LATENT_ROWS]
                        yield LatentChunk(position, piece, segment, start + len(piece) == len(rows))
                        position += len(piece)
                    left -= len(rows)
                    segment += 1
                    if reason == "length":
                        break
                if reason == "length":
                    break
        yield Finish(reason, Usage(completion_tokens=clauses, audio_tokens=position))

    def _phonemes(self, text: str) -> list[str]:
        """The phoneme strings of a clause, in hibari's alphabet; none if there is nothing to pronounce."""
        spoken = speakable(text)
        sentences = self._hibari.phonemize(spoken) if spoken else []
        return [part for sentence in sentences for part in _short(sentence) if any(char.isalpha() for char in part)]

    def _rows(self, phonemes: str, speed: float, ends_line: bool) -> Rows:
        """Latent rows of one segment, in C order."""
        rows = self._at_speed(self._hibari.ids(phonemes), speed)
        mark = phonemes.rstrip("\"'\u201d\u2019)] ")[-1:]
        pause = BREAK_ROWS if mark.isalpha() else PAUSE_ROWS
        return _trimmed(rows, LEAD_ROWS / speed, None if ends_line or mark in ".!?\u2026" else pause / speed)

    def _at_speed(self, ids: list[int], speed: float) -> Rows:
        """Rows whose number is that at speed 1, divided by ``speed``.

        The network rounds every phoneme's duration to whole units, which alone misses by up to 12 % at 1.3 and by 80 %
        at 4. So the speed is corrected by what came out, and the remainder by repeating or leaving out rows.
        """
        if speed == 1.0:
            return self._network(ids, 1.0)
        target = max(1, round(len(self._network(ids, 1.0)) / speed))
        low, high = MODEL_SPEEDS
        asked = min(max(speed, low), high)
        best = self._network(ids, asked)
        rows = best
        for _ in range(SPEED_CALLS - 1):
            if abs(len(best) / target - 1) <= SPEED_TOLERANCE:
                return best
            before, asked = asked, min(max(asked * len(rows) / target, low), high)
            if asked == before:
                break
            rows = self._network(ids, asked)
            best = min(best, rows, key=lambda r: abs(len(r) - target))
        index = ((np.arange(target) + 0.5) * (len(best) / target)).astype(np.int64)
        return best if abs(len(best) / target - 1) <= SPEED_TOLERANCE else best[index]

    def _network(self, ids: list[int], speed: float) -> Rows:
        feed = {"ids": np.asarray([ids], np.int64), "speed": np.asarray([speed], np.float32)}
        *spectra, f0 = self._hibari.sess.run(self._outputs, feed)
        rows = np.empty((f0.shape[1], ROW_WIDTH), np.float32)
        for i, spectrum in enumerate(spectra):
            rows[:, i * BINS : (i + 1) * BINS] = spectrum[0].T
        rows[:, -1] = f0[0]
        return rows


def _short(phonemes: str) -> list[str]:
    """``phonemes`` in parts of at most ``MAX_PHONEMES``, cut between words where there are any."""
    parts: list[str] = []
    while len(phonemes) > MAX_PHONEMES:
        cut = phonemes.rfind(" ", 1, MAX_PHONEMES + 1)
        cut = MAX_PHONEMES if cut < 0 else cut
        parts.append(phonemes[:cut])
        phonemes = phonemes[cut:].lstrip()
    return [*parts, phonemes]


def _trimmed(rows: Rows, lead: float, tail: float | None) -> Rows:
    """``rows`` with at most ``lead`` silent ones in front and ``tail`` behind; None keeps those behind."""
    lh, ln, lr = (rows[:, i * BINS : (i + 1) * BINS] for i in map(BRANCHES.index, ("lh", "ln", "lr")))
    voiced = rows[:, -1] > VOICED_HZ
    power = np.where(voiced, _power(lh), 0) + _power(ln) + _power(lr)
    loud = np.flatnonzero(power > power.max() * 10 ** (SILENCE_DB / 10))
    if not len(loud):  # NaN: the codec reports it
        return rows
    start = max(0, int(loud[0]) - round(lead))
    end = len(rows) if tail is None else int(loud[-1]) + 1 + round(tail)
    return rows[start:end]


def _power(log: Rows) -> Rows:
    """Sum of squared magnitudes per row, to a factor."""
    return np.asarray(np.exp(2 * np.minimum(log, np.float32(MAX_LOG))).sum(axis=1), np.float32)
