"""Token counts of a request, added up over its stages, in the shapes of OpenAI's routes."""

from dataclasses import dataclass
from typing import Any

from omni_ray.engine.types import Usage


@dataclass(slots=True)
class UsageTotals:
    """Sums over the ``Finish`` of every final stage."""

    prompt: int = 0
    completion: int = 0
    audio: int = 0
    image: int = 0

    def add(self, usage: Usage) -> None:
        """Counts one stage."""
        self.prompt += usage.prompt_tokens
        self.completion += usage.completion_tokens
        self.audio += usage.audio_tokens
        self.image += usage.image_tokens


def chat_usage(totals: UsageTotals) -> dict[str, Any]:
    """Chat: ``completion_tokens`` counts text and audio, the details say how many of each, as at OpenAI."""
    completion = totals.completion + totals.audio
    return {
        "prompt_tokens": totals.prompt,
        "completion_tokens": completion,
        "total_tokens": totals.prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "text_tokens": totals.completion,
            "audio_tokens": totals.audio,
            "reasoning_tokens": 0,
        },
    }


def speech_usage(totals: UsageTotals) -> dict[str, Any]:
    """Speech: everything that was produced is output."""
    output = totals.completion + totals.audio
    return {"input_tokens": totals.prompt, "output_tokens": output, "total_tokens": totals.prompt + output}


def transcript_usage(totals: UsageTotals) -> dict[str, Any]:
    """The usage of ``transcript.text.done``."""
    return {"type": "tokens", **speech_usage(totals)}


def image_usage(totals: UsageTotals) -> dict[str, Any]:
    """Pictures: what goes in is text, what comes out are places of the latent."""
    return {
        "input_tokens": totals.prompt,
        "input_tokens_details": {"image_tokens": 0, "text_tokens": totals.prompt},
        "output_tokens": totals.image,
        "output_tokens_details": {"image_tokens": totals.image, "text_tokens": 0},
        "total_tokens": totals.prompt + totals.image,
    }
