"""What voice_chat's thinker is asked: a chat in plain text, with the system message this pipeline needs."""

from dataclasses import dataclass
from typing import Final

DEFAULT_SYSTEM: Final = "You are a helpful voice assistant. Answer in one or two short spoken sentences."
"""Inserted when the chat has no system message; SmolLM2's chat template would insert another one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat for the thinker: ``messages`` as (role, text), oldest first."""

    messages: tuple[tuple[str, str], ...]

    def with_system(self) -> tuple[tuple[str, str], ...]:
        """The messages the model gets (cases.md C41).

        A chat with system messages keeps all of them, in order and in place; one without gets ``DEFAULT_SYSTEM`` in
        front. OpenAI's newer name ``developer`` becomes ``system``, the one the model was trained with.
        """
        messages = tuple(("system" if role == "developer" else role, text) for role, text in self.messages)
        if any(role == "system" for role, _ in messages):
            return messages
        return (("system", DEFAULT_SYSTEM), *messages)
