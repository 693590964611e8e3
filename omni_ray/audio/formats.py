"""Which formats an answer may have, by the names that clients write."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from omni_ray.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """One ``response_format``.

    Attributes:
        name: as the client writes it.
        content_type: without parameters.
        streamable: pieces may leave while the stream is encoded and nothing sent is ever patched afterwards.
    """

    name: str
    content_type: str
    streamable: bool


# FLAC is not streamable: libsndfile writes its length at the end, into the header; without it soundfile cannot read it.
FORMATS: Mapping[str, AudioFormat] = MappingProxyType(
    {
        "pcm": AudioFormat("pcm", "audio/pcm", streamable=True),
        "wav": AudioFormat("wav", "audio/wav", streamable=True),
        "flac": AudioFormat("flac", "audio/flac", streamable=False),
        "mp3": AudioFormat("mp3", "audio/mpeg", streamable=True),
        "opus": AudioFormat("opus", "audio/ogg", streamable=True),
    }
)


def find_format(name: object, *, streamed: bool, param: str) -> AudioFormat:
    """Looks up a client's format name; exact case, as OpenAI.

    Raises:
        InvalidRequestError: not a string, unknown, or not for this mode; lists what works for it.
    """
    works = ", ".join(known.name for known in FORMATS.values() if known.streamable or not streamed)
    choose = f"{'streamed' if streamed else 'unstreamed'} audio takes one of: {works}"
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        raise InvalidRequestError(f"'{param}' {name!r:.40} is not an audio format; {choose}", param)
    if streamed and not found.streamable:
        raise InvalidRequestError(f"'{param}' {found.name!r} cannot be streamed; {choose}", param)
    return found
