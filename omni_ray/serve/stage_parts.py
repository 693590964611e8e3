"""What every run of a stage shares."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omni_ray.config.deploy import StreamingConfig
from omni_ray.config.pipeline import StagePipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.base import Engine
from omni_ray.serve.effort import Effort
from omni_ray.serve.events import Opened
from omni_ray.serve.stage_client import Client

Processor = Callable[[Any, AsyncIterator[Any]], AsyncGenerator[Any, None]]


@dataclass(frozen=True, slots=True)
class StageParts:
    """Nothing of a request is ever kept here."""

    stage: StagePipelineConfig
    engine: Engine
    clients: Mapping[str, Client]
    processors: Mapping[str, Processor]
    streaming: StreamingConfig
    async_chunk: bool
    sampling: SamplingParams
    opened: Opened
    effort: Effort
