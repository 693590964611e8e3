"""What flows into and out of an engine: the request, and typed chunks with absolute positions.

Slotted dataclasses: they move once per chunk. Outputs are deltas, never growing snapshots; every one says where in
its stage's output it lies, so stitching, tests and replay need no guessing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from omni_ray.config.sampling import SamplingParams

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]

Pickled = tuple[type[Any], tuple[Any, ...]]
"""A call that makes the object again. Chunks that cross processes by the thousand are pickled so: by themselves frozen
slotted dataclasses look up their fields each time."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text inside a chat message."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A media item inside a chat message: ``index`` counts the request's media, in order of appearance."""

    kind: Literal["audio", "image", "video"]
    index: int


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    content: tuple[TextPart | MediaPart, ...]


@dataclass(frozen=True, slots=True)
class AudioClip:
    """A decoded clip of the request: float32 mono ``samples`` [n] in [-1, 1] at ``sample_rate`` Hz."""

    index: int
    samples: NDArray[np.float32]
    sample_rate: int


@dataclass(frozen=True, slots=True)
class ImageClip:
    """A decoded picture of the request: uint8 RGB ``pixels`` [height, width, 3]."""

    index: int
    pixels: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class VideoClip:
    """A decoded video of the request: uint8 RGB ``frames`` [n, height, width, 3], taken at ``fps`` a second."""

    index: int
    frames: NDArray[np.uint8]
    fps: float


Clip = AudioClip | ImageClip | VideoClip
"""A medium of the request; ``MediaPart.index`` counts all of them together.

An ``AudioClip`` with the index of a video is that video's sound, to be heard with it (``use_audio_in_video``).
"""


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """What pictures a request asks for; None is the model's own default.

    Attributes:
        text: what is to be seen. negative: what is not.
        count: how many; picture i is the one that the seed + i gives alone.
        width, height: in pixels, either both or none.
        steps: of denoising, for each picture.
        guidance_scale, true_cfg_scale: how closely the text is followed, as diffusers' pipelines call it.
        previews: of each picture, as it looks between its steps.
    """

    text: str
    negative: str | None = None
    count: int = 1
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    previews: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """What every stage may know of a request. Immutable; engines keep nothing of it when it is over.

    Attributes:
        request_id: made by the server, unique, never empty.
        attempt: 0, or 1 after the ingress retried. ``key`` is what engines file per-request state under.
        seed: always set; with a position it is the whole state of the request's randomness.
        priority: smaller is served first.
        served_s: audio seconds already served to this request's API key (fair sharing within a priority).
        messages, speech_text, image_prompt: the chat, or the text of a speech request, or the pictures to make.
        voice: canonical voice name, or None for the pipeline's default.
        speed: speech rate, 1.0 is normal.
        language: ISO 639-1 code the client named, or None.
        sampling: as the client gave it; inside an engine, as resolved for its stage.
        max_audio_seconds: the longest speech this request may produce.
        extras: validated extra fields of this model (``ModelExtras``), by name.
    """

    request_id: str
    seed: int
    attempt: int = 0
    priority: int = 0
    served_s: float = 0.0
    messages: tuple[Message, ...] = ()
    speech_text: str | None = None
    image_prompt: ImagePrompt | None = None
    voice: str | None = None
    speed: float = 1.0
    language: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_audio_seconds: float = 300.0
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        """(request id, attempt): a retried request never meets the state of its first attempt."""
        return (self.request_id, self.attempt)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """What a text stage was asked, once its prompt is computed; before any token. For stages that go on from it.

    Attributes:
        position: always 0.
        token_ids: the prompt, media placeholders expanded.
        grids: images and videos whose rows follow, in order: (time, height, width) in patches, and seconds per step of
            time.
        rows: latent rows of the prompt that follow in a ``LatentChunk``.
        limit: most tokens that may be generated; set by the engine.
        silent: ids that are markup, not words.
        silent_spans: (first, last) ids: whatever stands between them, they included, is not meant to be heard either.
    """

    position: int
    token_ids: tuple[int, ...]
    grids: tuple[tuple[int, int, int, float], ...] = ()
    rows: int = 0
    limit: int | None = None
    silent: frozenset[int] = frozenset()
    silent_spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TextChunk:
    """New text. ``position`` is the index of its first token; ``token_ids`` may be empty where ids have no meaning."""

    position: int
    text: str
    token_ids: tuple[int, ...] = ()

    def __reduce__(self) -> Pickled:
        return TextChunk, (self.position, self.text, self.token_ids)


@dataclass(frozen=True, slots=True)
class TranscriptChunk:
    """A recognised segment of clip ``clip``, ``start_s`` to ``end_s`` in seconds. ``position`` counts segments."""

    position: int
    clip: int
    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class LatentChunk:
    """Rows of continuous features, float32 ``rows`` [n, width].

    ``position`` is the index of the first row in the stage's whole output. ``segment`` counts the stretches that are
    decoded on their own (clauses); ``ends_segment`` marks a segment's last rows.
    """

    position: int
    rows: NDArray[np.float32]
    segment: int = 0
    ends_segment: bool = False


@dataclass(frozen=True, slots=True)
class CodeFrameChunk:
    """Code frames, integer ``frames`` [n, codebooks]; ``position`` is the index of the first frame."""

    position: int
    frames: NDArray[np.int64]

    def __reduce__(self) -> Pickled:
        return CodeFrameChunk, (self.position, self.frames)


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """Sound, float32 ``samples`` [n] or [n, channels] in [-1, 1]; ``position`` is the index of the first sample."""

    position: int
    samples: NDArray[np.float32]
    sample_rate: int

    def __reduce__(self) -> Pickled:
        return AudioChunk, (self.position, self.samples, self.sample_rate)


@dataclass(frozen=True, slots=True)
class StepChunk:
    """A step of denoising is done: number ``step`` (from 1) of ``steps``. ``position`` counts those of all pictures."""

    position: int
    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class ImageChunk:
    """Rows of a picture that has ``height`` of them, uint8 RGB ``pixels`` [n, width, 3].

    ``position`` is the index of the first row in the stage's whole output, previews included; ``row`` is its index in
    its own picture. ``preview``: the picture is not finished.
    """

    position: int
    pixels: NDArray[np.uint8]
    row: int
    height: int
    preview: bool = False

    @property
    def ends_picture(self) -> bool:
        """Whether these are the picture's last rows."""
        return self.row + len(self.pixels) == self.height


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one stage.

    ``audio_tokens`` are code frames or latent rows that became sound, ``image_tokens`` places of a latent that became
    pictures (previews do not count).
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    audio_tokens: int = 0
    image_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The last output of every request that ended well; exactly one."""

    reason: FinishReason = "stop"
    usage: Usage = Usage()


Chunk = PromptChunk | TextChunk | TranscriptChunk | LatentChunk | CodeFrameChunk | AudioChunk | StepChunk | ImageChunk
Output = Chunk | Finish
