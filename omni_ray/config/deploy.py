"""The deploy config: placement, sizes and limits, never topology. One YAML file, or the same keys inline.

Every problem is found at once and named by file, key and nearest known name. What a stage's ``engine:`` and
``deployment:`` blocks may hold is checked by the builder, against the models that engines and Ray Serve publish.
"""

import copy
import json
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator

from omni_ray.config.base import StrictModel, suggest
from omni_ray.config.ingress import IngressConfig
from omni_ray.config.pipeline import Edge, PipelineConfig, StagePipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.errors import ConfigError

TOPOLOGY_KEYS = frozenset({*StagePipelineConfig.model_fields, *Edge.model_fields}) - {"engine", "sampling"}


class StageDeployConfig(StrictModel):
    """One stage's placement and sizes.

    Attributes:
        deployment: Ray Serve's own option names (``num_replicas``, ``ray_actor_options``, ``autoscaling_config``...).
        engine: the engine's own option names; ``name`` chooses among the engines the pipeline allows.
        sampling: defaults that win over the pipeline's and lose to the request's.
        model: checkpoint directory or hub id of this stage; None takes the application's.
    """

    deployment: dict[str, Any] = Field(default_factory=dict)
    engine: dict[str, Any] = Field(default_factory=dict)
    sampling: SamplingParams = SamplingParams()
    model: str | None = Field(default=None, min_length=1)


class StreamingConfig(StrictModel):
    """How events travel between stages.

    Attributes:
        coalesce_ms: at most one message per stream in this time, but the first text and the first sound go at once, and
            what comes soon after them waits for less.
        inline_bytes: larger latents cross as object refs.
        window_mb: unread latents of one stream that may exist before its producer waits.
        first_chunk_timeout_s, idle_timeout_s: longest silence before, and between, events of a stream. The second one
            is shorter than the ingress's own, so that a stream whose node fell silent can still be taken over.
    """

    coalesce_ms: float = Field(default=20, ge=0)
    inline_bytes: int = Field(default=100_000, ge=0, le=1_000_000)
    window_mb: float = Field(default=64, gt=0)
    first_chunk_timeout_s: float = Field(default=60, gt=0)
    idle_timeout_s: float = Field(default=45, gt=0)

    def window_bytes(self) -> int:
        """``window_mb`` in bytes."""
        return int(self.window_mb * 2**20)


class ObserveConfig(StrictModel):
    """What is told about requests, beside metrics.

    Attributes:
        tracing: OpenTelemetry spans; where they go is said by OpenTelemetry's own environment variables.
        log_content: write what users say into the log; else no line holds any of it.
    """

    tracing: bool = False
    log_content: bool = False


class DeployConfig(StrictModel):
    """Placement and sizes of one pipeline.

    Attributes:
        pipeline: the pipeline it is for; None fits any that has the named stages.
        model: checkpoint directory or hub id.
        served_model_name: the id that clients use; None takes the pipeline's name.
        variant: stands in for the checkpoint's config where the builder cannot read it.
        load_format: ``dummy`` builds random weights for sizing.
        async_chunk: feed processors chunk by chunk; False hands them everything at once, with identical results.
        colocate: stages that share one process, as one deployment that is named after the last of them: what goes
            from one to the other crosses no process border. Their needs are added up; all else about their replicas is
            said at that last stage.
    """

    pipeline: str | None = None
    model: str | None = None
    served_model_name: str | None = None
    variant: dict[str, Any] | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    async_chunk: bool = True
    colocate: tuple[str, ...] = ()
    stages: dict[str, StageDeployConfig] = Field(default_factory=dict)
    streaming: StreamingConfig = StreamingConfig()
    observe: ObserveConfig = ObserveConfig()
    ingress: IngressConfig = IngressConfig()

    @field_validator("colocate")
    @classmethod
    def _several(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"names {twice[0]!r} twice")
        if len(names) == 1:
            raise ValueError("names one stage only; name two or more, or leave it out")
        return names

    def stage(self, name: str) -> StageDeployConfig:
        """The stage's block, or the defaults."""
        return self.stages.get(name, StageDeployConfig())

    def problems_for(self, pipeline: PipelineConfig, where: str) -> list[str]:
        """Stage names and pipeline name that do not fit ``pipeline``."""
        known = [s.name for s in pipeline.stages]
        out = [f"{where}: stages.{n}: unknown stage {n!r}; {suggest(n, known)}" for n in self.stages if n not in known]
        out += [f"{where}: colocate: unknown stage {n!r}; {suggest(n, known)}" for n in self.colocate if n not in known]
        if self.pipeline not in (None, pipeline.name, *pipeline.aliases):
            out.append(f"{where}: pipeline: is {self.pipeline!r}, but {pipeline.name!r} is being served")
        return out


_MERGE_TAG = "tag:yaml.org,2002:merge"


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice; plain YAML silently keeps the last."""


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == _MERGE_TAG:  # `<<: *anchor`; a key that stands beside it wins
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            hint = "a key must be one word; an unfilled template '{{ ... }}' reads like this"
            raise yaml.constructor.ConstructorError(None, None, hint, key_node.start_mark)
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"key {twice!r} is given twice")
    return made


Source = str | Path | Mapping[str, Any] | None


def read_deploy_config(source: Source) -> tuple[str, dict[str, Any]]:
    """The raw mapping of a deploy config, and the name by which messages call it.

    Args:
        source: a YAML file's path, an inline mapping (or its JSON text), or None for all defaults.

    Raises:
        ConfigError: unreadable file (naming node and path), YAML error with its line, or not a mapping.
    """
    if source is None:
        return "deploy_config", {}
    if isinstance(source, Mapping):
        return "deploy_config", dict(source)
    text, where = str(source), str(source)
    if text.lstrip().startswith("{"):
        where = "deploy_config"
        try:
            loaded = json.loads(text, object_pairs_hook=_unique_pairs)
        except ValueError as error:
            raise ConfigError([f"{where}: not valid JSON: {error}"]) from error
    else:
        try:
            loaded = yaml.load(Path(text).read_text(), Loader=_UniqueKeyLoader)
        except OSError as error:
            node = os.uname().nodename
            reason = error.strerror or str(error)
            hint = "pass an absolute path or an inline mapping"
            raise ConfigError([f"{where}: cannot be read on node {node!r}: {reason}; {hint}"]) from error
        except UnicodeDecodeError as error:
            raise ConfigError([f"{where}: not UTF-8 text: {error}"]) from error
        except yaml.YAMLError as error:
            raise ConfigError([f"{where}: not valid YAML: {' '.join(str(error).split())}"]) from error
    if loaded is None:
        loaded = {}
    if not isinstance(loaded, dict):
        raise ConfigError([f"{where}: must be a mapping with keys {', '.join(DeployConfig.model_fields)}"])
    return where, loaded


def parse_deploy_config(where: str, raw: Mapping[str, Any]) -> DeployConfig:
    """Validate a raw mapping; ``ConfigError`` lists every problem."""
    try:
        return DeployConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(validation_problems(error, DeployConfig, where)) from error


def valid_part(raw: Mapping[str, Any]) -> DeployConfig:
    """What is left of a raw mapping without its invalid keys, so that one mistake does not hide the others."""
    kept = copy.deepcopy(dict(raw))
    while True:
        try:
            return DeployConfig.model_validate(kept)
        except ValidationError as error:
            _drop(kept, error.errors()[0]["loc"])


def _drop(mapping: dict[Any, Any], loc: tuple[int | str, ...]) -> None:
    """Delete the deepest key of ``mapping`` that ``loc`` leads to; everything if it leads nowhere."""
    key = _key_at(mapping, loc)
    if key is None:
        mapping.clear()
    elif isinstance(mapping[key], dict) and _key_at(mapping[key], loc[1:]) is not None:
        _drop(mapping[key], loc[1:])
    else:
        del mapping[key]


def _key_at(mapping: Mapping[Any, Any], loc: Sequence[int | str]) -> Any:
    """The key that pydantic calls ``loc[0]``; it writes keys that are no strings in its own way."""
    return next((key for key in mapping for part in loc[:1] if str(part) in (str(key), repr(key))), None)


def validation_problems(
    error: ValidationError, model: type[BaseModel], where: str, prefix: tuple[str, ...] = ()
) -> list[str]:
    """One sentence per validation error: ``where``, the key's path, what is wrong, the nearest known key.

    Args:
        error: what validating against ``model`` raised.
        model: the model at ``prefix`` in the file.
        where: the file's name.
        prefix: keys that lead to the part that was validated.
    """
    out = []
    for item in error.errors():
        loc = [part for part in item["loc"] if part != "[key]"]
        key = ".".join(str(part) for part in (*prefix, *loc))
        owner = _model_at(model, loc[:-1])
        if item["type"] == "extra_forbidden" and owner is not None:
            last = str(loc[-1])
            if owner is StageDeployConfig and last in TOPOLOGY_KEYS:
                out.append(
                    f"{where}: {key}: {last!r} is topology; it is frozen in the pipeline's declaration, a deploy "
                    f"config only places and sizes; known: {', '.join(owner.model_fields)}"
                )
            else:
                out.append(f"{where}: {key}: unknown key {last!r}; {suggest(last, owner.model_fields)}")
        elif item["type"] == "invalid_key" or "[key]" in item["loc"]:
            out.append(f"{where}: {key}: a key must be a name, got {_short(item['input'])}")
        elif item["type"] in ("model_type", "dict_type"):
            inside = _model_at(model, loc)
            known = f" with keys {', '.join(inside.model_fields)}" if inside is not None else ""
            out.append(f"{where}: {key}: must be a mapping{known}, got {_short(item['input'])}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            out.append(f"{where}: {key}: {message[0].lower()}{message[1:]}, got {_short(item['input'])}")
    return out


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _model_at(model: type[BaseModel], loc: Sequence[Any]) -> type[BaseModel] | None:
    """The model class found by walking ``loc`` down from ``model``; dict values count as one step."""
    current: Any = model
    for part in loc:
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(str(part))
            current = field.annotation if field else None
        elif typing.get_origin(current) is dict:
            current = typing.get_args(current)[1]
        if typing.get_origin(current) in (typing.Union, types.UnionType):
            choices = (a for a in typing.get_args(current) if isinstance(a, type))
            current = next((a for a in choices if issubclass(a, BaseModel)), None)
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None
