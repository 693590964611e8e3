"""What each deployment is built from: plain data, made by ``resolve``, the same on every replica."""

from dataclasses import dataclass
from typing import Literal

from omni_ray.config.deploy import ObserveConfig, StreamingConfig
from omni_ray.config.ingress import IngressConfig
from omni_ray.config.pipeline import PipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.options import EngineOptions
from omni_ray.serve.serve_options import ServeOptions


@dataclass(frozen=True, slots=True)
class StageSpec:
    """Everything a stage is built from, the same in every replica."""

    pipeline: PipelineConfig
    stage: str
    model: str | None
    model_arch: str
    load_format: Literal["auto", "dummy"]
    engine_path: str
    engine_options: EngineOptions
    sampling: SamplingParams
    streaming: StreamingConfig
    async_chunk: bool
    observe: ObserveConfig


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """A deployment of one stage, or of several that share a process.

    Attributes:
        stages: in the order data flows; the last one gives the deployment its name.
        derived: Ray Serve's options.
    """

    stages: tuple[StageSpec, ...]
    derived: ServeOptions

    @property
    def name(self) -> str:
        """The deployment's."""
        return self.stages[-1].stage


@dataclass(frozen=True, slots=True)
class IngressSpec:
    """Everything an ingress replica is built from."""

    pipeline: PipelineConfig
    config: IngressConfig
    streaming: StreamingConfig
    observe: ObserveConfig
    model_name: str
    derived: ServeOptions
