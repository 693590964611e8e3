"""WHICH: every name omni_ray knows, and how it is resolved. Names and dotted paths only; imports happen on demand.

Adding a model is one line in ``OMNI_PIPELINES`` (a pipeline), one in ``_MODELS`` per architecture, and, if it takes
extra request fields, one in ``_EXTRAS``. Out of tree, an installed package calls ``register_pipeline`` and
``OmniModelRegistry.register`` from a function named by an entry point in the group ``omni_ray.general_plugins``.

MODEL-INV-001: a pipeline is selected by explicit registration, never by scanning.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from omni_ray.config.base import suggest
from omni_ray.config.hf_config import read_hf_config
from omni_ray.config.pipeline import PipelineConfig, StageExecutionType, StagePipelineConfig
from omni_ray.engine.collector import resume, uncollected
from omni_ray.engine.options import EngineOptions
from omni_ray.errors import ConfigError
from omni_ray.plugins import load_plugins

OMNI_PIPELINES: dict[str, str] = {
    "any_thinker": "omni_ray.models.any_thinker.pipeline:resolve",
    "cascade": "omni_ray.cascade:resolve",
    "csm": "omni_ray.models.csm.pipeline:PIPELINE",
    "diffusion": "omni_ray.models.diffusion.pipeline:PIPELINE",
    "higgs_audio_v2": "omni_ray.models.higgs_audio_v2.pipeline:PIPELINE",
    "moss_tts_nano": "omni_ray.models.moss_tts_nano.pipeline:PIPELINE",
    "qwen2_5_omni": "omni_ray.models.qwen2_5_omni.pipeline:resolve",
    "qwen3_omni": "omni_ray.models.qwen3_omni.pipeline:resolve",
    "qwen3_tts": "omni_ray.models.qwen3_tts.pipeline:resolve",
    "ramp": "omni_ray.models.ramp.pipeline:PIPELINE",
    "voice_chat": "omni_ray.models.voice_chat.pipeline:PIPELINE",
    "voxcpm2": "omni_ray.models.voxcpm2.pipeline:PIPELINE",
}
"""Pipeline name -> dotted path of a ``PipelineConfig``, or of a resolver ``(hf_config: dict) -> PipelineConfig``."""

_MODELS: dict[str, str] = {
    "AnyThinker": "omni_ray.models.any_thinker.thinker:AnyThinker",
    "AnyThinkerVLLM": "omni_ray.models.any_thinker.vllm_thinker:AnyThinkerVLLM",
    "RampThinker": "omni_ray.models.ramp.stages:RampThinker",
    "RampTalker": "omni_ray.models.ramp.stages:RampTalker",
    "RampCode2Wav": "omni_ray.models.ramp.code2wav:RampCode2Wav",
    "WhisperListener": "omni_ray.models.voice_chat.listener:WhisperListener",
    "SmolLM2Thinker": "omni_ray.models.voice_chat.thinker:SmolLM2Thinker",
    "SmolLM2ThinkerVLLM": "omni_ray.models.voice_chat.vllm_thinker:SmolLM2ThinkerVLLM",
    "HibariTalker": "omni_ray.models.voice_chat.talker:HibariTalker",
    "HibariCodec": "omni_ray.models.voice_chat.code2wav:HibariCodec",
    "CsmTalker": "omni_ray.models.csm.talker:CsmTalker",
    "CsmCode2Wav": "omni_ray.models.csm.code2wav:CsmCode2Wav",
    "DiffusersTextToImage": "omni_ray.models.diffusion.model:DiffusersTextToImage",
    "HiggsTalker": "omni_ray.models.higgs_audio_v2.talker:HiggsTalker",
    "HiggsCode2Wav": "omni_ray.models.higgs_audio_v2.code2wav:HiggsCode2Wav",
    "MossTTSNano": "omni_ray.models.moss_tts_nano.model:MossTTSNano",
    "Qwen2_5OmniThinker": "omni_ray.models.qwen2_5_omni.thinker:Qwen2_5OmniThinker",
    "Qwen2_5OmniTalker": "omni_ray.models.qwen2_5_omni.talker:Qwen2_5OmniTalker",
    "Qwen2_5OmniToken2Wav": "omni_ray.models.qwen2_5_omni.token2wav:Qwen2_5OmniToken2Wav",
    "VoxCPM2": "omni_ray.models.voxcpm2.model:VoxCPM2",
    "Qwen3OmniThinker": "omni_ray.models.qwen3_omni.thinker:Qwen3OmniThinker",
    "Qwen3OmniThinkerVLLM": "omni_ray.models.qwen3_omni.vllm_thinker:Qwen3OmniThinkerVLLM",
    "Qwen3OmniTalker": "omni_ray.models.qwen3_omni.talker:Qwen3OmniTalker",
    "Qwen3TTS": "omni_ray.models.qwen3_tts.model:Qwen3TTS",
    "Qwen3OmniCode2Wav": "omni_ray.models.qwen3_omni.code2wav:Qwen3OmniCode2Wav",
}

_EXTRAS: dict[str, str] = {
    "CsmTalker": "omni_ray.models.csm.options:EXTRAS",
    "HiggsTalker": "omni_ray.models.higgs_audio_v2.options:EXTRAS",
    "MossTTSNano": "omni_ray.models.moss_tts_nano.options:EXTRAS",
    "RampThinker": "omni_ray.models.ramp.options:EXTRAS",
    "VoxCPM2": "omni_ray.models.voxcpm2.options:EXTRAS",
}


_VLLM_MODELS: dict[str, str] = {
    "Qwen3OmniThinkerWithPositions": "omni_ray.models.qwen3_omni.vllm_rows:Qwen3OmniThinkerWithPositions",
    "Qwen3OmniThinkerWithRows": "omni_ray.models.qwen3_omni.vllm_rows:Qwen3OmniThinkerWithRows",
}
"""Model classes of ours that vLLM computes: architecture -> dotted path."""


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine by dotted path, and the option model it publishes (import-light)."""

    path: str
    options: str


ENGINES: dict[str, EngineEntry] = {
    "ar": EngineEntry("omni_ray.engine.ar:AREngine", "omni_ray.engine.options:AROptions"),
    "codec": EngineEntry("omni_ray.engine.codec:CodecEngine", "omni_ray.engine.options:CodecOptions"),
    "diffusion": EngineEntry("omni_ray.engine.diffusion:DiffusionEngine", "omni_ray.engine.options:DiffusionOptions"),
    "generator": EngineEntry("omni_ray.engine.generator:GeneratorEngine", "omni_ray.engine.options:GeneratorOptions"),
    "latent_text": EngineEntry(
        "omni_ray.models.qwen2_5_omni.latent_engine:LatentTextEngine", "omni_ray.engine.options:AROptions"
    ),
    "per_request": EngineEntry(
        "omni_ray.engine.per_request:PerRequestEngine", "omni_ray.engine.options:PerRequestOptions"
    ),
    "vllm": EngineEntry("omni_ray.engine.vllm_engine:VLLMEngine", "omni_ray.engine.vllm_options:VLLMOptions"),
}

_DEFAULT_ENGINE = {
    StageExecutionType.LLM_AR: "ar",
    StageExecutionType.LLM_GENERATION: "codec",
    StageExecutionType.DIFFUSION: "diffusion",
}


@dataclass(frozen=True, slots=True)
class ModelExtras:
    """Extra request fields of one architecture: ``fields`` validates them strictly; the serving layer only looks here.

    ``fields`` maps the request's field name to the pydantic model (or type adapter source) that validates it.
    """

    fields: Mapping[str, type[BaseModel]]


Resolver = Callable[[Mapping[str, Any]], PipelineConfig]


def import_dotted(path: str) -> Any:
    """The attribute that ``package.module:attribute`` names."""
    module, _, attribute = path.partition(":")
    if not attribute:
        raise ConfigError([f"{path!r} is no dotted path of the form 'package.module:attribute'"])
    try:
        with uncollected():
            return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError([f"{path!r} cannot be imported: {error}"]) from error


def register_pipeline(name: str, path: str) -> None:
    """Register an out-of-tree pipeline. A name that is taken by another path is an error, never overwritten."""
    if OMNI_PIPELINES.setdefault(name, path) != path:
        raise ConfigError([f"pipeline {name!r} is already registered as {OMNI_PIPELINES[name]!r}"])


def pipeline_names() -> tuple[str, ...]:
    """Names of all registered pipelines, plugins included, sorted."""
    load_plugins()
    return tuple(sorted(OMNI_PIPELINES))


def is_pipeline(name: str) -> bool:
    """Whether ``load_pipeline`` knows the name or alias."""
    load_plugins()
    return name in OMNI_PIPELINES or _by_alias(name) is not None


def load_pipeline(name: str, model: str | None = None, variant: Mapping[str, Any] | None = None) -> PipelineConfig:
    """The pipeline called ``name`` (or one of its aliases), resolved for a checkpoint.

    Args:
        name: registry name or alias.
        model: checkpoint directory, for pipelines whose registration is a resolver.
        variant: replaces the checkpoint's config as the resolver's input, where the files are not at hand.

    Raises:
        ConfigError: unknown name (naming the nearest one), a broken declaration, or an unreadable checkpoint config.
    """
    load_plugins()
    registered = name if name in OMNI_PIPELINES else _by_alias(name)
    if registered is None:
        raise ConfigError([f"unknown pipeline {name!r}; {suggest(name, OMNI_PIPELINES)}"])
    declared = import_dotted(OMNI_PIPELINES[registered])
    if not isinstance(declared, PipelineConfig):
        hf_config = variant if variant is not None else read_hf_config(model) if model else {}
        resolver: Resolver = declared
        declared = resolver(hf_config)
    problems = declared.problems()
    if declared.name != registered:
        path = OMNI_PIPELINES[registered]
        problems.append(f"{path!r} is registered as {registered!r} but declares the name {declared.name!r}")
    if problems:
        raise ConfigError(problems)
    return declared


def _by_alias(name: str) -> str | None:
    """The registry name of the pipeline with this alias. A resolver's aliases are those of its default variant."""
    fits = [registered for registered, path in OMNI_PIPELINES.items() if name in declared_at(path, {}).aliases]
    if len(fits) > 1:
        raise ConfigError([f"{name!r} is an alias of several pipelines: {', '.join(sorted(fits))}"])
    return fits[0] if fits else None


def declared_at(path: str, hf_config: Mapping[str, Any]) -> PipelineConfig:
    """What ``OMNI_PIPELINES`` names by ``path``; a resolver is called with ``hf_config``."""
    declared: PipelineConfig | Resolver = import_dotted(path)
    return declared if isinstance(declared, PipelineConfig) else declared(hf_config)


class OmniModelRegistry:
    """Architecture name -> model class, lazily; vLLM's own table is included where vLLM is installed."""

    @staticmethod
    def register(architecture: str, path: str) -> None:
        """Register an out-of-tree architecture. A name taken by another path is an error."""
        if _MODELS.setdefault(architecture, path) != path:
            raise ConfigError([f"architecture {architecture!r} is already registered as {_MODELS[architecture]!r}"])

    @staticmethod
    def architectures() -> tuple[str, ...]:
        """All names that ``load`` accepts."""
        load_plugins()
        return tuple(sorted({*_MODELS, *_vllm_architectures()}))

    @staticmethod
    def load(architecture: str) -> type[Any]:
        """The class for ``architecture``; imports its module."""
        load_plugins()
        if architecture in _MODELS:
            loaded: type[Any] = import_dotted(_MODELS[architecture])
            return loaded
        if architecture in _vllm_architectures():
            from vllm import ModelRegistry

            loaded, _ = ModelRegistry.resolve_model_cls([architecture], None)
            return loaded
        raise ConfigError([f"unknown architecture {architecture!r}; {suggest(architecture, _MODELS)}"])

    @staticmethod
    def known(architecture: str) -> bool:
        """Whether ``load`` would find it, without importing it."""
        load_plugins()
        return architecture in _MODELS or architecture in _vllm_architectures()


def _vllm_architectures() -> frozenset[str]:
    """The table of vLLM, if it is installed. Importing vLLM costs seconds, so only an unknown name comes here."""
    if importlib.util.find_spec("vllm") is None:
        return frozenset()
    from vllm import ModelRegistry

    return frozenset(ModelRegistry.get_supported_archs())


def register_with_vllm() -> None:
    """Tell vLLM our model classes: our entry point in ``vllm.general_plugins``, run in each of vLLM's processes."""
    resume()  # vLLM is imported
    from vllm import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    for architecture, path in _VLLM_MODELS.items():
        if architecture not in known:
            ModelRegistry.register_model(architecture, path)


def engine_entry(stage: StagePipelineConfig, chosen: str | None = None) -> tuple[str, EngineEntry]:
    """Name and entry of a stage's engine: the deploy config's choice, the pipeline's, or the execution type's default.

    Raises:
        ConfigError: the choice is not among those the pipeline allows, or unknown.
    """
    declared = stage.engine or _DEFAULT_ENGINE[stage.execution_type]
    name = chosen or declared
    allowed = (declared, *stage.engine_choices)
    if name not in allowed:
        raise ConfigError([f"stages.{stage.name}.engine.name: {name!r} is not allowed here; {suggest(name, allowed)}"])
    if name in ENGINES:
        entry = ENGINES[name]
    elif ":" in name:
        entry = EngineEntry(name, "omni_ray.engine.options:EngineOptions")
    else:
        raise ConfigError([f"stage {stage.name!r}: unknown engine {name!r}; {suggest(name, ENGINES)}"])
    own = stage.engine_options if name == declared else None
    return name, EngineEntry(entry.path, own or entry.options)


def engine_options(stage: StagePipelineConfig, chosen: str | None = None) -> type[EngineOptions]:
    """The option model that the stage's engine publishes."""
    loaded: type[EngineOptions] = import_dotted(engine_entry(stage, chosen)[1].options)
    return loaded


def extras_for(pipeline: PipelineConfig) -> Mapping[str, type[BaseModel]]:
    """Extra request fields of all the pipeline's architectures, by field name."""
    fields: dict[str, type[BaseModel]] = {}
    for stage in pipeline.stages:
        if stage.model_arch in _EXTRAS:
            extras: ModelExtras = import_dotted(_EXTRAS[stage.model_arch])
            fields.update(extras.fields)
    return fields


def register_extras(architecture: str, path: str) -> None:
    """Register the ``ModelExtras`` of an out-of-tree architecture."""
    if _EXTRAS.setdefault(architecture, path) != path:
        raise ConfigError([f"extras of {architecture!r} are already registered as {_EXTRAS[architecture]!r}"])
