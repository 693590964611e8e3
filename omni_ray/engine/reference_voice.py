"""Reference voices: a recording that speech is to sound like, as extra request fields shared by the models that do it.

``ref_audio`` and ``ref_text`` are vLLM-Omni's names on ``/v1/audio/speech``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, RootModel, StringConstraints

from omni_ray.audio import decode_audio, decode_base64
from omni_ray.errors import InvalidRequestError

MAX_SECONDS: Final = 30.0
"""The longest recording; models use 3 to 15 seconds."""
MAX_CHARACTERS: Final = 2_700_000
"""Of base64, so that the envelope stays below the 4 MB that a message between stages may have."""


class RefAudio(RootModel[Annotated[str, StringConstraints(min_length=1, max_length=MAX_CHARACTERS, strict=True)]]):
    """A recording as base64 or a base64 ``data:`` URL: wav, flac, ogg or mp3, at most 30 seconds."""


class RefText(RootModel[Annotated[str, StringConstraints(min_length=1, max_length=2000, strict=True)]]):
    """What is said in ``ref_audio``."""


REFERENCE_FIELDS: Final[Mapping[str, type[BaseModel]]] = {"ref_audio": RefAudio, "ref_text": RefText}
"""For a model's ``ModelExtras``."""


@dataclass(frozen=True, slots=True)
class ReferenceVoice:
    """A recording, float32 mono ``samples`` [n] at ``sample_rate`` Hz, and its text if the client gave it."""

    samples: NDArray[np.float32]
    sample_rate: int
    text: str | None


@dataclass(frozen=True, slots=True)
class SpokenTurn:
    """A turn of a conversation that was heard: float32 mono ``samples`` [n], and the ``text`` that is said in them."""

    text: str
    samples: NDArray[np.float32]


def spoken_turn(extras: Mapping[str, Any], sample_rate: int) -> SpokenTurn | None:
    """The reference of a request, for a model that continues a conversation; None if it brings none. Blocking.

    Raises:
        InvalidRequestError: as ``reference_voice``, or the recording comes without its text.
    """
    reference = reference_voice(extras, sample_rate)
    if reference is None:
        return None
    if reference.text is None:
        raise InvalidRequestError("ref_text: this model needs the words that are said in ref_audio", "ref_text")
    return SpokenTurn(reference.text, reference.samples)


def reference_voice(extras: Mapping[str, Any], sample_rate: int) -> ReferenceVoice | None:
    """The reference of a request, decoded; None if it brings none. Blocking: some milliseconds per second of sound.

    Raises:
        InvalidRequestError: no audio, too long, or a text without a recording (C04).
    """
    audio, text = extras.get("ref_audio"), extras.get("ref_text")
    if not isinstance(audio, RefAudio):
        if isinstance(text, RefText):
            raise InvalidRequestError("ref_text: needs ref_audio, the recording in which it is said", "ref_audio")
        return None
    data = decode_base64(audio.root, param="ref_audio", max_bytes=MAX_CHARACTERS)
    samples = decode_audio(data, param="ref_audio", sample_rate=sample_rate, max_seconds=MAX_SECONDS)
    return ReferenceVoice(samples, sample_rate, text.root if isinstance(text, RefText) else None)
