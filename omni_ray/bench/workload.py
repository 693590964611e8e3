"""What is asked of a server: a seeded list of requests, the same for every server that gets the same seed."""

import io
import random
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from omni_ray.audio import decode_audio
from omni_ray.config.base import StrictModel
from omni_ray.errors import ConfigError, InvalidRequestError

Kind = Literal["chat", "speech", "transcription"]

CLIP_RATE_HZ = 16_000
_WORDS = """about after again always answer apple arrive autumn because before begin behind believe better between black
blue bottle bread bridge bright bring brother build butter carry castle change children circle city clean clear close
cloud coffee cold color come corner count country cover cross dance danger daughter decide deep different dinner
distance doctor dollar door double dream dress drive early earth east easy eight empty enough evening every example
face family famous farmer father field finger finish fire first five flower follow forest forget forward friend front
garden general gentle glass gold grass great green ground group guess hammer happy harbor head hear heart heavy high
hold home horse hour house hundred idea island journey jump keep kind king kitchen known lady language large laugh
learn letter light listen little long machine market matter measure middle million minute moment money month morning
mother mountain music narrow nation natural never night north nothing number ocean offer often open orange order other
paint paper part people perhaps picture piece place planet please point power present problem promise public question
quick quiet rain reach ready reason record remember rest right river road round school science season second seven
shape short silver simple sister sleep small smile snow soft south speak spring square stand start station still stone
story street strong student summer sugar table teach thank think thousand three thunder time together tomorrow touch
tower travel tree true under until valley village visit voice wait walk wall warm watch water weather west wheel white
window winter wonder wood word work world write yellow yesterday young""".split()  # noqa: SIM905 - fifteen lines, not two hundred


class Workload(StrictModel):
    """Everything that decides what is sent and when; two runs with equal workloads send equal requests.

    Attributes:
        kind: the route: chat completions, speech, or transcriptions.
        requests: how many are measured. warmup: how many are sent before, not counted.
        concurrency: closed loop: so many clients, each sends its next request when its last one ended.
        rate: Poisson arrivals, requests per second on average, however many are still running.
        words: words of text in each request (chat, speech).
        max_tokens: limit of the answer's text; None leaves it to the server.
        text_only: chat without sound.
        audio: a clip that goes in (chat, transcription): a file sent as it is, or with ``audio_seconds`` cut there.
        audio_seconds: without ``audio``: a synthesised clip of this length, another one for each request.
        voice: None sends none.
        seed: of the texts, the clips, the arrival times, and each request's own ``seed`` (seed + number).
        extra_body: further fields of each request, as they are; they win over ours.
    """

    kind: Kind
    requests: int = Field(default=16, ge=1)
    warmup: int = Field(default=2, ge=0)
    concurrency: int | None = Field(default=None, ge=1)
    rate: float | None = Field(default=None, gt=0)
    words: int = Field(default=100, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    text_only: bool = False
    audio: str | None = None
    audio_seconds: float | None = Field(default=None, gt=0, le=3600)
    voice: str | None = "alloy"
    seed: int = Field(default=0, ge=0, lt=2**32)
    extra_body: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_schedule(self) -> "Workload":
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("give either concurrency (closed loop) or rate (Poisson arrivals)")
        if self.kind == "transcription" and self.audio is None and self.audio_seconds is None:
            raise ValueError("a transcription needs audio (a file) or audio_seconds (a synthesised clip)")
        if self.kind == "speech" and (self.audio is not None or self.audio_seconds is not None):
            raise ValueError("speech takes no audio")
        return self


@dataclass(frozen=True, slots=True)
class Clip:
    """A sound file and its length."""

    data: bytes
    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a workload."""

    index: int
    text: str
    clip: Clip | None
    seed: int


class Asks:
    """The requests of a workload, one by one.

    Raises:
        ConfigError: the clip cannot be read.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._file = None if workload.audio is None else _read_clip(workload.audio, workload.audio_seconds)

    def ask(self, index: int, warm_up: bool = False) -> Ask:
        """Request ``index``, the same at every call; those of the warm-up are others."""
        workload = self._workload
        seed = workload.seed + index
        rng = random.Random(f"{workload.seed}/{index}/{warm_up}")
        words = [rng.choice(_WORDS) for _ in range(workload.words)]
        clip = self._file
        if clip is None and workload.audio_seconds is not None:
            clip = _synthesised(workload.audio_seconds, rng.getrandbits(32))
        return Ask(index, " ".join(words), clip, seed)


def arrival_times(workload: Workload) -> list[float]:
    """Seconds after the start at which each request is sent: a Poisson process of ``rate``."""
    assert workload.rate is not None
    rng, now, times = random.Random(f"{workload.seed}/arrivals"), 0.0, []
    for _ in range(workload.requests):
        times.append(now)
        now += rng.expovariate(workload.rate)
    return times


def _read_clip(path: str, seconds: float | None) -> Clip:
    try:
        data = Path(path).read_bytes()
        samples = decode_audio(data, param="audio", sample_rate=CLIP_RATE_HZ, max_seconds=3600)
    except OSError as error:
        raise ConfigError([f"audio: {path} cannot be read: {error.strerror}"]) from error
    except InvalidRequestError as error:
        raise ConfigError([f"audio: {path}: {error.message}"]) from error
    if seconds is None:
        return Clip(data, Path(path).name, len(samples) / CLIP_RATE_HZ)
    wanted = round(seconds * CLIP_RATE_HZ)
    if len(samples) < wanted:
        raise ConfigError([f"audio: {path} lasts {len(samples) / CLIP_RATE_HZ:.2f} s, less than audio_seconds"])
    return Clip(_wav(samples[:wanted]), "clip.wav", wanted / CLIP_RATE_HZ)


def _synthesised(seconds: float, seed: int) -> Clip:
    """Vowel-like sound, four syllables a second: harmonics of a gliding voice, never silent for long. No words."""
    rng = np.random.default_rng(seed)
    count = max(1, round(seconds * CLIP_RATE_HZ))
    time = np.arange(count) / CLIP_RATE_HZ
    syllable = (time * 4).astype(np.int64)
    pitch = rng.uniform(90, 220, syllable[-1] + 1)[syllable]
    loudness = np.abs(np.sin(np.pi * time * 4)) * rng.uniform(0.4, 1.0, syllable[-1] + 1)[syllable]
    phase = 2 * np.pi * np.cumsum(pitch) / CLIP_RATE_HZ
    voiced = sum(np.sin(k * phase) / k for k in range(1, 12))
    samples = loudness * (voiced + 0.05 * rng.standard_normal(count)) * 0.25
    return Clip(_wav(np.clip(samples, -1, 1).astype(np.float32)), "clip.wav", count / CLIP_RATE_HZ)


def _wav(samples: NDArray[np.float32]) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(CLIP_RATE_HZ)
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()
