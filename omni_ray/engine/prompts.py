"""What every text engine asks of its input: exactly one prompt, and room behind it for an answer."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from omni_ray.errors import InvalidRequestError, StageFailedError


async def only_prompt(stage: str, inputs: Mapping[str, AsyncIterator[Any]]) -> Any:
    """The single item that a stage's inputs yield.

    Raises:
        StageFailedError: there was none, or one too many.
    """
    prompts = [prompt for source in inputs.values() async for prompt in source]
    if len(prompts) != 1:
        raise StageFailedError(f"stage {stage} takes exactly one prompt, got {len(prompts)}")
    return prompts[0]


def room_for_answer(length: int, max_model_len: int) -> int:
    """Tokens that may follow a prompt of ``length``.

    Raises:
        InvalidRequestError: none may, or there is no prompt.
    """
    longest = max_model_len - 1
    if not 0 < length <= longest:
        raise InvalidRequestError(f"the messages are {length} tokens long; this model takes 1 to {longest}", "messages")
    return max_model_len - length
