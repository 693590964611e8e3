"""The strict model all our configuration derives from, and how unknown names are answered."""

import difflib
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Immutable; an unknown key is an error, never silently dropped; so is an infinite number or one that is none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


def suggest(name: str, known: Iterable[str]) -> str:
    """``did you mean 'talker'? known: code2wav, talker, thinker`` for an unknown ``name``."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(names) or 'none'}"
