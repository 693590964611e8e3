"""Sampling fields for an output that is always made the same way."""

from collections.abc import Callable, Mapping
from typing import Any

from omni_ray.config.pipeline import PipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.errors import InvalidRequestError
from omni_ray.serve.planner import Plan

_NO_CHANGE: Mapping[str, Any] = {"temperature": 0, "repetition_penalty": 1, "stop": (), "ignore_eos": False}


def unread_sampling(
    pipeline: PipelineConfig, plan: Plan, sampling: SamplingParams, name_of: Callable[[str], str]
) -> list[str]:
    """Sampling fields of the client's that no stage of ``plan`` reads.

    There are none if any output of the plan is among ``PipelineConfig.sampled_outputs``. Otherwise the answer is always
    the likeliest one. A field that asks for just that (``temperature`` 0, ``repetition_penalty`` 1), or chooses among
    likely ones (``top_p``, ``top_k``), changes nothing and is returned; every other one is refused (C39).

    Args:
        pipeline: what is served.
        plan: the request's.
        sampling: what the client said.
        name_of: the client's name for a field of ``SamplingParams``.

    Raises:
        InvalidRequestError: naming the field.
    """
    if any(kind in pipeline.sampled_outputs for kind, _ in plan.outputs):
        return []
    said = sampling.model_dump(exclude_none=True)
    for name, value in said.items():
        if name not in ("top_p", "top_k") and (name not in _NO_CHANGE or value != _NO_CHANGE[name]):
            made = " and ".join(kind for kind, _ in plan.outputs)
            param = name_of(name)
            raise InvalidRequestError(f"{param}: this model always makes {made} the same way; leave it out", param)
    return [name_of(name) for name in said]
