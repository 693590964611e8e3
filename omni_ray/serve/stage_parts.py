"""What every run of a stage shares: its started engine, and what surrounds that."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omni_ray.config.deploy import StreamingConfig
from omni_ray.config.pipeline import StagePipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.base import Engine, EngineContext, Progress
from omni_ray.registry import OmniModelRegistry, import_dotted
from omni_ray.serve.effort import Effort
from omni_ray.serve.events import Opened
from omni_ray.serve.logs import stage_context
from omni_ray.serve.specs import StageSpec
from omni_ray.serve.stage_client import Client
from omni_ray.serve.version import code_version

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

    @classmethod
    def of(cls, spec: StageSpec, engine: Engine, clients: Mapping[str, Client], replica: str) -> "StageParts":
        """Around a started engine.

        Args:
            spec: what the stage is built from.
            engine: see ``start_engine``.
            clients: to the stages that it may call.
            replica: the name that the stage's streams open with.
        """
        stage = spec.pipeline.stage(spec.stage)
        versions = {
            consumer.name: edge.schema_version
            for consumer in spec.pipeline.stages
            for edge in consumer.stage_edges()
            if edge.source == stage.name
        }
        version = code_version(spec, type(engine), engine.context.model_cls)
        resumable = engine.resumable != "none"
        return cls(
            stage=stage,
            engine=engine,
            clients=clients,
            processors={edge.processor: import_dotted(edge.processor) for edge in stage.inputs},
            streaming=spec.streaming,
            async_chunk=spec.async_chunk,
            sampling=spec.sampling,
            opened=Opened(stage.name, replica, versions, version=version, resumable=resumable),
            effort=Effort(),
        )


async def start_engine(spec: StageSpec, progress: Progress) -> Engine:
    """Load the stage's model and start its engine; raises what ``Engine.start`` does."""
    stage = spec.pipeline.stage(spec.stage)
    model = spec.model
    if model is None and (prepare := stage.prepare or spec.pipeline.prepare) is not None:
        model = str(await asyncio.to_thread(import_dotted(prepare), progress))
    model_cls = OmniModelRegistry.load(spec.model_arch)
    context = EngineContext(stage, model, model_cls, spec.engine_options, spec.load_format, progress)
    engine: Engine = import_dotted(spec.engine_path)(context)
    await asyncio.create_task(engine.start(), context=stage_context(stage.name))
    return engine
