"""Sampling parameters of one stage, and the order in which their sources win."""

from typing import Annotated, Self

from pydantic import Field

from omni_ray.config.base import StrictModel


class SamplingParams(StrictModel):
    """What a request, a deploy config or a pipeline may say about sampling; ``None`` means "not said".

    Field names are OpenAI's and vLLM's. ``temperature`` 0 is greedy.
    """

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
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
