"""What a pipeline is: its stages, the edges between them, and how each stage's parts are selected.

Frozen topology; nothing here places or sizes anything (that is ``DeployConfig``) and nothing here imports a model:
classes, processors and engines are named by dotted paths (``package.module:attribute``) or registry names.
"""

from collections.abc import Collection
from enum import Enum
from struct import pack, unpack
from typing import Literal

from pydantic import Field

from omni_ray.config.base import StrictModel, suggest
from omni_ray.config.sampling import SamplingParams

REQUEST = "request"
"""The source name of an edge that is fed by the request itself."""

OutputKind = Literal["text", "audio", "transcript", "image"]
RequestPart = Literal["messages", "input_audio", "input_image", "input_video", "speech_text", "image_prompt"]


_MADE_FROM: dict[str, OutputKind] = {"speech_text": "text", "messages": "transcript"}
"""What ``Edge.rewrites`` makes a part of the request from."""


class StageExecutionType(str, Enum):
    """How a stage computes; it gives the default engine (MODEL-INV-001: a pipeline may name another)."""

    LLM_AR = "llm_ar"
    LLM_GENERATION = "llm_generation"
    DIFFUSION = "diffusion"


class Edge(StrictModel):
    """One input of a stage: where it comes from and the processor that turns it into the stage's inputs.

    Attributes:
        source: an upstream stage's name, or ``request``.
        processor: dotted path of an async generator ``(request, upstream chunks) -> inputs``; it runs in the
            consumer's replica.
        schema_version: version of what crosses this edge; a consumer refuses another one.
        parts: the request's parts this edge's processor reads. A request edge must list at least one.
        carries_refs: whether upstream outputs may be large latents that cross as object refs; or the parts of a request
            that lead to such latents. A message that may hold refs costs four times as much as one that may not.
        takes: the kind of final output that is all the processor reads of its source, which may then be any stage that
            makes it; None if it must be the very stage that is named.
        rewrites: the processor is a request edge's: it gets the request with this part written anew from what the
            source made, the ``speech_text`` from its text or the ``messages`` from its transcripts.
    """

    source: str
    processor: str
    schema_version: int = Field(default=1, ge=1)
    parts: tuple[RequestPart, ...] = ()
    carries_refs: bool | tuple[RequestPart, ...] = False
    takes: OutputKind | None = None
    rewrites: Literal["speech_text", "messages"] | None = None

    def carries_refs_of(self, parts: Collection[RequestPart]) -> bool:
        """Whether refs may cross when the request supplies ``parts``."""
        if isinstance(self.carries_refs, bool):
            return self.carries_refs
        return any(part in parts for part in self.carries_refs)


class StageLimits(StrictModel):
    """Hard limits of a stage's implementation; a deploy config beyond them is refused, naming ``reason``."""

    max_num_seqs: int | None = Field(default=None, ge=1)
    reason: str = ""


class StagePipelineConfig(StrictModel):
    """One stage of a pipeline. The stage's name is its deployment's name, its YAML key and its metric label.

    Attributes:
        name: unique in the pipeline.
        execution_type: gives the default engine.
        model_arch: architecture name looked up in ``OmniModelRegistry``.
        inputs: edges; either all stage edges feed a request, or one request edge replaces them.
        final_output_type: the kind of output a client can ask for, or None for an inner stage.
        engine_output_type: what the engine emits, in words for people (``token``, ``latent``, ``code frame``).
        owns_tokenizer: this stage turns text into tokens; request-level sampling applies to it.
        engine: registry name or dotted path of the engine; None takes the execution type's default.
        engine_choices: other engines that a deploy config may choose.
        engine_archs: by engine, the architecture that it computes instead of ``model_arch``.
        engine_options: dotted path of the pydantic model of this stage's engine options (import-light); None takes
            the engine's own.
        sampling: pipeline defaults. sampling_constraints: values that win over every request.
        limits: hard limits, for instance batch size 1.
        prepare: as the pipeline's, for this stage alone; it wins.
        num_cpus, num_gpus: what one replica needs unless the deploy config says otherwise.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    execution_type: StageExecutionType
    model_arch: str
    inputs: tuple[Edge, ...] = Field(min_length=1)
    final_output_type: OutputKind | None = None
    engine_output_type: str = "token"
    owns_tokenizer: bool = False
    engine: str | None = None
    engine_choices: tuple[str, ...] = ()
    engine_archs: dict[str, str] = Field(default_factory=dict)
    engine_options: str | None = None
    sampling: SamplingParams = SamplingParams()
    sampling_constraints: SamplingParams = SamplingParams()
    limits: StageLimits = StageLimits()
    prepare: str | None = None
    num_cpus: float = Field(default=0.1, gt=0)
    num_gpus: float = Field(default=0, ge=0)

    def arch_for(self, engine: str) -> str:
        """The architecture that ``engine`` computes."""
        return self.engine_archs.get(engine, self.model_arch)

    def stage_edges(self) -> tuple[Edge, ...]:
        """Edges fed by other stages."""
        return tuple(e for e in self.inputs if e.source != REQUEST)

    def request_edges(self) -> tuple[Edge, ...]:
        """Edges fed by the request itself; each is an alternative to all stage edges together."""
        return tuple(e for e in self.inputs if e.source == REQUEST)


class Voices(StrictModel):
    """The voices a pipeline speaks with. ``aliases`` maps other names (OpenAI's thirteen, say) to them."""

    names: tuple[str, ...] = ()
    default: str | None = None
    aliases: dict[str, str] = Field(default_factory=dict)

    def problems(self) -> list[str]:
        """Names that lead to no voice, each with the nearest known one."""
        out = []
        if self.default is not None and self.default not in self.names:
            out.append(f"voices.default {self.default!r} is unknown; {suggest(self.default, self.names)}")
        for alias, voice in self.aliases.items():
            if voice not in self.names:
                out.append(f"voices.aliases.{alias}: unknown voice {voice!r}; {suggest(voice, self.names)}")
        return out


class VideoSampling(StrictModel):
    """Which frames of a video reach the stages, spread evenly over all of them.

    As transformers' ``Qwen2VLVideoProcessor.sample_frames``.

    Attributes:
        fps: frames taken a second.
        least, most: frames taken of a short and of a long video.
        multiple: their number is rounded down to a multiple of it; a video of fewer frames is taken whole.
    """

    fps: float = Field(default=2, gt=0)
    least: int = Field(default=4, ge=1)
    most: int = Field(default=768, ge=1)
    multiple: int = Field(default=2, ge=1)

    def indices(self, count: int, rate: float) -> list[int]:
        """Of ``count`` frames, ``rate`` a second, those that are taken, ascending."""
        most = min(self.most, count) // self.multiple * self.multiple
        taken = int(min(max(count / rate * self.fps, self.least), most)) // self.multiple * self.multiple
        if not taken:
            return list(range(count))
        step = count / taken
        # upstream's positions are float32, in which products just below a whole number become that number
        return [int(unpack("f", pack("f", place * step))[0]) for place in range(taken)]


class PipelineConfig(StrictModel):
    """A pipeline, declared once.

    Attributes:
        name: registry name; also the served model's id unless the deploy config says otherwise.
        description: one sentence for ``omni-ray list``.
        stages: in any order; edges name each other.
        aliases: other names that select this pipeline.
        hf_architectures: checkpoint architectures that select it.
        hf_model_types: checkpoint ``model_type`` values that select it, where no architecture does.
        checkpoint_basenames: checkpoint directory names, in any case, that select it where neither does.
        fallback: dotted path of a function ``(config.json) -> reason or None``: why it can serve a checkpoint that none
            of these names of any pipeline selects, told to people; None if it cannot.
        prepare: dotted path of a function ``(progress) -> model directory`` that makes the weights from installed
            packages when no ``model`` is given; None if a model must be given or none is needed.
        checkpoints: kinds of checkpoint that can be made (``tiny``, ``dummy``); for each the dotted path of a
            function ``(out: Path) -> None``.
        untried: why the tests that every pipeline must pass run nothing of this one; None if its tiny checkpoint, its
            prepared weights, or none at all are enough to run it.
        voices: what ``/v1/audio/voices`` lists.
        speech_speed: slowest and fastest ``speed`` that the models honour.
        languages: ISO 639-1 codes, lower case, that a request's ``language`` may be; empty is any.
        sampled_outputs: outputs whose making follows the client's sampling fields. Others are always made the same
            way, and a sampling field that would change them is refused.
        input_audio_sample_rate: Hz at which stages take audio.
        input_video: which frames of a video stages take.
        max_input_audio_seconds, max_audio_seconds: longest clip in and speech out that the models are good for.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    description: str
    stages: tuple[StagePipelineConfig, ...] = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    hf_architectures: tuple[str, ...] = ()
    hf_model_types: tuple[str, ...] = ()
    checkpoint_basenames: tuple[str, ...] = ()
    fallback: str | None = None
    prepare: str | None = None
    checkpoints: dict[str, str] = Field(default_factory=dict)
    untried: str | None = Field(default=None, min_length=1)
    voices: Voices = Voices()
    speech_speed: tuple[float, float] = (1.0, 1.0)
    languages: tuple[str, ...] = ()
    sampled_outputs: tuple[OutputKind, ...] = ("text",)
    input_audio_sample_rate: int = Field(default=16000, ge=1)
    input_video: VideoSampling = VideoSampling()
    max_input_audio_seconds: float = Field(default=600, gt=0)
    max_audio_seconds: float = Field(default=300, gt=0)

    def stage(self, name: str) -> StagePipelineConfig:
        """The stage called ``name``; ``KeyError`` if there is none."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    def output_kinds(self) -> tuple[OutputKind, ...]:
        """What a client can ask for, in declared order."""
        return tuple(dict.fromkeys(s.final_output_type for s in self.stages if s.final_output_type))

    def topological(self) -> tuple[StagePipelineConfig, ...]:
        """Stages so that every source comes before its consumers; ``ValueError`` on a cycle."""
        done: dict[str, StagePipelineConfig] = {}
        left = list(self.stages)
        while left:
            ready = [s for s in left if all(e.source in done for e in s.stage_edges())]
            if not ready:
                raise ValueError(f"cycle among stages {', '.join(s.name for s in left)}")
            done.update((s.name, s) for s in ready)
            left = [s for s in left if s.name not in done]
        return tuple(done.values())

    def problems(self) -> list[str]:
        """Everything wrong with the graph, each naming the stage, the key and the nearest known name."""
        out: list[str] = []
        names = [s.name for s in self.stages]
        for name in sorted({n for n in names if names.count(n) > 1}):
            out.append(f"pipeline {self.name!r}: stage {name!r} is declared twice")
        for stage in self.stages:
            where = f"pipeline {self.name!r}, stage {stage.name!r}"
            if stage.name == REQUEST or stage.name == "ingress":
                out.append(f"{where}: the name {stage.name!r} is reserved")
            for engine in stage.engine_archs:
                if engine not in (stage.engine, *stage.engine_choices):
                    out.append(f"{where}.engine_archs: {engine!r} is no engine of this stage")
            for i in range(len(stage.inputs)):
                out += self._edge_problems(stage, i, f"{where}, inputs[{i}]")
        for kind in self.output_kinds():
            makers = [s.name for s in self.stages if s.final_output_type == kind]
            if len(makers) > 1:
                out.append(f"pipeline {self.name!r}: {kind} is the final output of {' and '.join(makers)}; one may be")
        if not self.output_kinds():
            out.append(f"pipeline {self.name!r}: no stage has a final_output_type, nothing can be asked for")
        out += [f"pipeline {self.name!r}: {problem}" for problem in self.voices.problems()]
        if not out:
            try:
                self.topological()
            except ValueError as error:
                out.append(f"pipeline {self.name!r}: {error}")
        return out

    def _edge_problems(self, stage: StagePipelineConfig, index: int, key: str) -> list[str]:
        """What is wrong with one input of ``stage``; ``key`` leads to it."""
        out: list[str] = []
        edge, sources, names = stage.inputs[index], [e.source for e in stage.inputs], [s.name for s in self.stages]
        if edge.source == REQUEST:
            if not edge.parts:
                out.append(f"{key}.parts: a request edge must list the request parts it takes")
            if edge.carries_refs:
                out.append(f"{key}.carries_refs: a request edge has no upstream stage")
        elif edge.source not in names:
            out.append(f"{key}.source: unknown stage {edge.source!r}; {suggest(edge.source, names)}")
        elif (first := sources.index(edge.source)) < index:
            out.append(f"{key}.source: {edge.source!r} feeds this stage already by inputs[{first}]")
        elif edge.takes not in (None, made := self.stage(edge.source).final_output_type):
            out.append(f"{key}: takes {edge.takes}, but stage {edge.source!r} makes {made or 'no final output'}")
        if edge.rewrites is not None and edge.takes != _MADE_FROM[edge.rewrites]:
            out.append(f"{key}.rewrites: {edge.rewrites} are made from a {_MADE_FROM[edge.rewrites]}")
        if ":" not in edge.processor:
            out.append(f"{key}.processor: {edge.processor!r} is no 'module:function'")
        return out
