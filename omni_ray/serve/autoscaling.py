"""The ``autoscaling_config:`` of a deployment: stages scale by listeners' slack, the ingress as Ray Serve does."""

import warnings
from collections.abc import Mapping
from typing import Any, Self

from pydantic import ConfigDict, Field, model_validator
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from omni_ray.config.base import StrictModel
from omni_ray.serve.slack import SlackPolicy, Tuning

NOT_FOR_STAGES = {
    "target_ongoing_requests": "a stage never scales by ongoing requests, since a chain holds one in every stage; set "
    "target_load",
    "policy": "a stage scales by its listeners' slack; tune target_load, slack_s and wait_s",
    "aggregation_function": "the last report of each replica counts",
    "look_back_period_s": "the last report of each replica counts; set report_every_s",
    "metrics_interval_s": "set report_every_s",
    "downscale_to_zero_delay_s": "a stage without a replica cannot become ready",
}
"""Serve's options that mean nothing where a stage scales by slack, and why."""


class StrictAutoscaling(AutoscalingConfig):  # type: ignore[misc]
    """Ray Serve's own model drops unknown keys silently; this one refuses them."""

    model_config = ConfigDict(extra="forbid")

    def serve(self) -> AutoscalingConfig:
        """As Serve's controller knows it."""
        return AutoscalingConfig(**self.model_dump(exclude_unset=True))


class StageAutoscaling(StrictModel):
    """How a stage scales; names that Ray Serve has too mean the same.

    Attributes:
        initial_replicas: replicas to begin with; None is ``min_replicas``.
        upscale_delay_s, downscale_delay_s: how long more, or fewer, must be wanted.
        upscaling_factor, downscaling_factor: part of the difference that one step makes up for.
        target_load: the part of a replica's places, and of its time, that is to be in use.
        slack_s: a listener whose stream has less lead than this, and waits for this stage, is about to hear a gap.
        wait_s: a request that stands in the engine's queue for longer presses.
        report_every_s: how often replicas report to Serve's controller.
    """

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    initial_replicas: int | None = Field(default=None, ge=1)
    upscale_delay_s: float = Field(default=2, ge=0)
    downscale_delay_s: float = Field(default=600, ge=0)
    upscaling_factor: float = Field(default=1, gt=0)
    downscaling_factor: float = Field(default=1, gt=0)
    target_load: float = Field(default=Tuning().target_load, gt=0, le=1)
    slack_s: float = Field(default=Tuning().slack_s, ge=0)
    wait_s: float = Field(default=Tuning().wait_s, gt=0)
    report_every_s: float = Field(default=1, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _means_something(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            useless = [f"{name}: {reason}" for name, reason in NOT_FOR_STAGES.items() if name in data]
            if useless:
                raise ValueError("; ".join(useless))
        return data

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        first = self.min_replicas if self.initial_replicas is None else self.initial_replicas
        if not self.min_replicas <= first <= self.max_replicas:
            raise ValueError("min_replicas <= initial_replicas <= max_replicas does not hold")
        return self

    def tuning(self) -> Tuning:
        """What the policy goes by."""
        return Tuning(self.target_load, self.slack_s, self.wait_s)

    def serve(self) -> AutoscalingConfig:
        """As Serve's controller knows it; the policy travels inside it."""
        policy = AutoscalingPolicy(
            policy_function=f"{SlackPolicy.__module__}:{SlackPolicy.__name__}", policy_kwargs=self.tuning()._asdict()
        )
        own = self.model_dump(include=AutoscalingConfig.model_fields.keys() & type(self).model_fields.keys())
        with warnings.catch_warnings():
            # to be replaced by an environment variable of each process, which no deployment can set for itself
            warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
            return AutoscalingConfig(
                **own, policy=policy, metrics_interval_s=self.report_every_s, look_back_period_s=5 * self.report_every_s
            )
