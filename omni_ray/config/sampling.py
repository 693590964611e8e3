"""Sampling parameters of one stage, and the order in which their sources win."""

from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field

from omni_ray.config.base import StrictModel

MAX_COUNT: Final = 2**31 - 1
"""Larger ``max_tokens`` and ``top_k`` mean "no limit" and become this, so that no engine overflows."""
GREEDY_BELOW: Final = 1e-5
"""Lower temperatures are 0, as in vLLM: logits divided by them overflow."""
LEAST_TOP_P: Final = 1e-6
"""OpenAI takes ``top_p`` 0, vLLM does not: both draw the most likely token."""

_Temperature = Annotated[
    float, Field(ge=0, le=2), AfterValidator(lambda value: value if value >= GREEDY_BELOW else 0.0)
]
_TopP = Annotated[float, Field(ge=0, le=1), AfterValidator(lambda value: max(value, LEAST_TOP_P))]
_Count = Annotated[int, Field(ge=1), AfterValidator(lambda count: min(count, MAX_COUNT))]


class SamplingParams(StrictModel):
    """What a request, a deploy config or a pipeline may say about sampling; ``None`` means "not said".

    Field names are OpenAI's and vLLM's. ``temperature`` 0 is greedy. A ``repetition_penalty`` has a lower bound because
    logits are divided by it.
    """

    temperature: _Temperature | None = None
    top_p: _TopP | None = None
    top_k: _Count | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    max_tokens: _Count | None = None
    stop: tuple[str, ...] | None = None
    ignore_eos: bool | None = None

    def over(self, weaker: "SamplingParams") -> Self:
        """These parameters, completed by ``weaker`` ones wherever this one says nothing."""
        said = self.model_dump(exclude_none=True)
        return self.model_validate({**weaker.model_dump(exclude_none=True), **said})

    @classmethod
    def resolve(cls, *, constraints: Self, request: Self, deploy: Self, default: Self) -> "SamplingParams":
        """Precedence: sampling constraints > request > deploy YAML > pipeline default."""
        return constraints.over(request.over(deploy.over(default)))
