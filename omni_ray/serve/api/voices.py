"""Voice names: what a client may call a voice, and the list of them."""

from typing import Any

from omni_ray.config.pipeline import Voices
from omni_ray.errors import InvalidRequestError
from omni_ray.serve.api.errors import shown


def resolve_voice(voices: Voices, value: Any, param: str) -> str:
    """The pipeline's name for the voice a client named as a string or ``{"id": ...}`` (C46).

    Raises:
        InvalidRequestError: anything else, with the list of voices.
    """
    name = value.get("id") if isinstance(value, dict) else value
    if isinstance(name, str):
        wanted = name.strip().casefold()
        table = {alias.strip().casefold(): target for alias, target in voices.aliases.items()}
        table.update((known.strip().casefold(), known) for known in voices.names)
        if wanted in table:
            return table[wanted]
    listed = ", ".join((*voices.names, *voices.aliases)) or "none, leave the field out"
    raise InvalidRequestError(f"{param}: {shown(name)} is not a voice of this model; voices: {listed}", param)


def voices_body(voices: Voices) -> dict[str, Any]:
    """The answer of ``GET /v1/audio/voices``."""
    return {
        "voices": list(voices.names),
        "default": voices.default,
        "aliases": dict(voices.aliases),
        "uploaded_voices": [],
    }
