"""One contract for every registered pipeline; a new one falls under it by its line in ``OMNI_PIPELINES``.

The stages run in this process, on a tiny checkpoint (or prepared weights, or none where none are needed), in
``deterministic`` mode. What cannot be run says why in its own declaration (``PipelineConfig.untried``).
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from omni_ray.config.pipeline import REQUEST, OutputKind, PipelineConfig, RequestPart
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.base import Engine
from omni_ray.engine.codec import Codec
from omni_ray.engine.types import (
    AudioChunk,
    AudioClip,
    Clip,
    Finish,
    ImageChunk,
    ImageClip,
    ImagePrompt,
    MediaPart,
    Message,
    Request,
    StepChunk,
    TextChunk,
    TextPart,
    TranscriptChunk,
    VideoClip,
)
from omni_ray.registry import (
    _EXTRAS,
    OMNI_PIPELINES,
    OmniModelRegistry,
    engine_entry,
    engine_options,
    import_dotted,
    load_pipeline,
)
from omni_ray.selection import select_for_checkpoint
from omni_ray.serve.planner import Plan, all_plans
from omni_ray.serve.resolve import AppArgs, ResolvedApp, resolve
from omni_ray.serve.stage_parts import start_engine

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from one_process import LocalDispatcher, chain

CROWD: Final = 8
SMALL: Final = {"threads": 1, "cpu_threads": 1, "max_model_len": 512, "base_frames": 8, "frames_per_unit": 1}
"""Engine options of a small run, for the engines that publish them."""

WORDS: Final = ("One two three.", "Say it again, please.", "And what is that?")
SAMPLING: Final = SamplingParams(temperature=0.8, max_tokens=8)
LONGEST_S: Final = 1.5
LONGEST_FRAMES: Final = 256
"""More frames or rows than any answer here has."""

one_loop = pytest.mark.asyncio(loop_scope="module")
names = pytest.mark.parametrize("name", sorted(OMNI_PIPELINES))


@dataclass(frozen=True)
class Ask:
    """A plan of a pipeline, and the parts of the request that it reads."""

    plan: Plan
    parts: frozenset[RequestPart]

    def request(self, number: int) -> Request:
        """The ``number``-th request like this: another text and another seed."""
        text = WORDS[number % len(WORDS)]
        parts: list[TextPart | MediaPart] = [MediaPart(_KIND[part], i) for i, part in enumerate(self.media())]
        chat = (Message("user", (*parts, TextPart(text))),) if "messages" in self.parts else ()
        return Request(
            f"{'-'.join(sorted(self.parts))}-{number}",
            seed=number,
            messages=chat,
            speech_text=text if "speech_text" in self.parts else None,
            image_prompt=ImagePrompt(text, steps=2) if "image_prompt" in self.parts else None,
            sampling=SAMPLING,
            max_audio_seconds=LONGEST_S,
        )

    def media(self) -> list[RequestPart]:
        return sorted(self.parts & _KIND.keys())

    def clips(self, rate: int) -> list[Clip]:
        """A second of tones, a picture, a video of four frames: no noise, so that nothing depends on a generator."""
        time = np.arange(rate, dtype=np.float32) / rate
        shade = np.linspace(0, 255, 56, dtype=np.uint8)
        picture = np.stack(np.broadcast_arrays(shade[:, None], shade, np.uint8(90)), -1)
        made: list[Clip] = []
        for index, part in enumerate(self.media()):
            if part == "input_audio":
                made.append(AudioClip(index, 0.2 * np.sin(2 * np.pi * 220 * time * (1 + time)), rate))
            elif part == "input_image":
                made.append(ImageClip(index, picture))
            else:
                made.append(VideoClip(index, np.stack([picture] * 4), 2.0))
        return made


_KIND: Final[dict[RequestPart, Any]] = {"input_audio": "audio", "input_image": "image", "input_video": "video"}


def asks(pipeline: PipelineConfig) -> list[Ask]:
    """Of all combinations of request parts the smallest and the largest, each with all outputs that it can have."""
    found: dict[frozenset[RequestPart], Plan] = {}
    for plan in all_plans(pipeline):
        parts = frozenset(p for s in plan.stages for i in s.edges for p in pipeline.stage(s.name).inputs[i].parts)
        if parts not in found or len(found[parts].outputs) < len(plan.outputs):
            found[parts] = plan
    ends = [p for p in found if not any(p > q for q in found) or not any(p < q for q in found)]
    return [Ask(found[parts], parts) for parts in sorted(ends, key=sorted)]


@dataclass
class Answer:
    """Everything that one stream gave, joined; positions are checked as it comes."""

    texts: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sound: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    pictures: list[NDArray[np.uint8]] = field(default_factory=list)
    finishes: dict[str, Finish] = field(default_factory=dict)

    def add(self, stage: str, output: Any) -> None:
        assert stage not in self.finishes, f"{stage} went on behind its finish"
        if isinstance(output, Finish):
            self.finishes[stage] = output
        elif isinstance(output, TextChunk):
            assert output.position == len(self.tokens.get(stage, ()))
            self.texts[stage] = self.texts.get(stage, "") + output.text
            self.tokens[stage] = (*self.tokens.get(stage, ()), *output.token_ids)
        elif isinstance(output, AudioChunk):
            assert output.position == len(self.sound)
            self.sound = np.concatenate((self.sound, output.samples)) if len(self.sound) else output.samples
        elif isinstance(output, ImageChunk):
            assert output.position == sum(len(rows) for rows in self.pictures)
            self.pictures.append(output.pixels)
        elif isinstance(output, StepChunk):
            assert 0 <= output.step <= output.steps
        elif isinstance(output, TranscriptChunk):
            self.texts[stage] = self.texts.get(stage, "") + output.text
        else:
            raise AssertionError(f"{type(output).__name__} is no final output")

    def check_complete(self, kinds: Sequence[tuple[OutputKind, str]]) -> None:
        for kind, stage in kinds:
            assert stage in self.finishes, f"{stage} has no finish"
            if kind == "audio":
                assert np.isfinite(self.sound).all()
                assert len(self.sound)
            elif kind == "text":
                assert self.texts[stage]
            elif kind == "image":
                assert self.pictures

    def same_but_for_sound(self, other: "Answer") -> bool:
        mine, theirs = [np.concatenate(p) if p else np.zeros(0) for p in (self.pictures, other.pictures)]
        return (self.texts, self.tokens) == (other.texts, other.tokens) and np.array_equal(mine, theirs)

    def same(self, other: "Answer") -> bool:
        return (
            self.same_but_for_sound(other)
            and self.finishes == other.finishes
            and np.array_equal(self.sound, other.sound)
        )


class Running:
    """A pipeline in this process: streamed, and once more in one piece."""

    def __init__(self, app: ResolvedApp, streamed: LocalDispatcher, whole: LocalDispatcher, engines: list[Engine]):
        self.pipeline, self.app, self._engines = app.pipeline, app, engines
        self._streamed, self._whole = streamed, whole
        self._alone: dict[str, Answer] = {}

    async def answer(self, ask: Ask, number: int, whole: bool = False, most: int | None = None) -> Answer:
        """One request's answer; with ``most``, hung up on after so many outputs."""
        made, dispatcher = Answer(), self._whole if whole else self._streamed
        clips = ask.clips(self.pipeline.input_audio_sample_rate)
        async with aclosing(dispatcher.stream(ask.request(number), ask.plan, clips)) as stream:
            async for event in stream:
                made.add(event.stage, event.output)
                if most is not None and (most := most - 1) == 0:
                    return made
        made.check_complete(ask.plan.outputs)
        return made

    async def alone(self, ask: Ask, number: int) -> Answer:
        """The answer when nothing else runs."""
        key = ask.request(number).request_id
        if key not in self._alone:
            self._alone[key] = await self.answer(ask, number)
        return self._alone[key]

    async def check_idle(self) -> None:
        """Every engine's counters are back at zero, soon."""
        for engine in self._engines:
            for _ in range(400):
                stats = engine.stats()
                if (stats.running, stats.queued, stats.encoder_bytes) == (0, 0, 0):
                    break
                await asyncio.sleep(0.05)
            else:
                raise AssertionError(f"stage {engine.context.stage.name} still holds {stats}")
            await engine.check_health()


class Runner:
    """Starts pipelines; equal engines (a cascade's and its parts') are started once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._engines: dict[str, Engine] = {}
        self._running: dict[str, Running] = {}

    def checkpoint(self, pipeline: PipelineConfig) -> Path | None:
        """The tiny checkpoint, made once; None if the pipeline makes none."""
        if "tiny" not in pipeline.checkpoints:
            return None
        out = self._directory / pipeline.name
        if not out.exists():
            import_dotted(pipeline.checkpoints["tiny"])(out)
        return out

    async def run(self, name: str) -> Running:
        declared = load_pipeline(name)
        if declared.untried is not None:
            pytest.skip(f"{name}: {declared.untried}")
        if name not in self._running:
            model = self.checkpoint(declared)
            streamed = resolve(name, _arguments(declared, model, True))
            whole = resolve(name, _arguments(declared, model, False))
            engines = [{s.stage: await self._engine(app, s) for s in app.stages} for app in (streamed, whole)]
            every = [*engines[0].values(), *engines[1].values()]
            self._running[name] = Running(streamed, chain(streamed, engines[0]), chain(whole, engines[1]), every)
        return self._running[name]

    async def _engine(self, app: ResolvedApp, spec: Any) -> Engine:
        stage = app.pipeline.stage(spec.stage)
        prepare = spec.model or stage.prepare or app.pipeline.prepare
        key = f"{spec.engine_path} {spec.model_arch} {prepare} {spec.engine_options!r}"
        if key not in self._engines:
            self._engines[key] = await start_engine(spec, print)
        return self._engines[key]

    async def stop(self) -> None:
        for engine in self._engines.values():
            await engine.stop()


def _arguments(pipeline: PipelineConfig, model: Path | None, streamed: bool) -> AppArgs:
    stages = {}
    for stage in pipeline.stages:
        fields = engine_options(stage).model_fields
        options = {key: value for key, value in SMALL.items() if key in fields}
        options["deterministic"] = True
        options["max_num_seqs"] = min(CROWD, stage.limits.max_num_seqs or CROWD)
        if "trust_remote_code" in fields:  # we have made the checkpoint ourselves
            options["trust_remote_code"] = True
        model_cls = OmniModelRegistry.load(stage.model_arch)
        if "chunk_frames" in fields and not (issubclass(model_cls, Codec) and model_cls.streaming == "whole"):
            options["chunk_frames"] = [1, 2, 5] if streamed else [LONGEST_FRAMES]
        stages[stage.name] = {"engine": options}
    config = {"async_chunk": streamed, "stages": stages}
    return AppArgs(model=None if model is None else str(model), deploy_config=config)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def runner(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runner]:
    made = Runner(tmp_path_factory.mktemp("contract"))
    yield made
    await made.stop()


@names
def test_it_loads_alone(name: str) -> None:
    """Its declaration needs no other model family and none of the heavy packages."""
    path = OMNI_PIPELINES[name]
    script = f"""
import json, sys
from omni_ray.registry import load_pipeline
load_pipeline({name!r})
print(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert not {"ray", "torch", "vllm", "transformers", "diffusers", "fastapi"} & set(loaded)
    if path.startswith("omni_ray.models."):
        family = path.split(".")[2]
        families = {module.split(".")[2] for module in loaded if module.startswith("omni_ray.models.")}
        assert families == {family}


@names
def test_its_references_resolve(name: str) -> None:
    """Every class, function and option model that the declaration names, for every engine that it allows."""
    pipeline = load_pipeline(name)
    paths = [*pipeline.checkpoints.values(), *([pipeline.prepare] if pipeline.prepare else [])]
    for stage in pipeline.stages:
        paths += [edge.processor for edge in stage.inputs] + ([stage.prepare] if stage.prepare else [])
        for choice in (None, *stage.engine_choices):
            chosen, entry = engine_entry(stage, choice)
            assert engine_options(stage, choice).model_fields.keys() >= {"max_num_seqs", "deterministic"}
            assert isinstance(OmniModelRegistry.load(stage.arch_for(chosen)), type)
            if chosen != "vllm":  # its module imports vLLM, which need not be here
                paths.append(entry.path)
        if stage.model_arch in _EXTRAS:
            paths.append(_EXTRAS[stage.model_arch])
    for path in paths:
        assert import_dotted(path) is not None


@names
def test_its_graph_is_valid(name: str) -> None:
    """Every stage is in some plan, every final output can be asked for, and nothing needs a deploy config."""
    pipeline = load_pipeline(name)
    assert pipeline.problems() == []
    plans = all_plans(pipeline)
    assert {stage for plan in plans for stage in plan.names()} == {stage.name for stage in pipeline.stages}
    assert {kind for plan in plans for kind, _ in plan.outputs} == set(pipeline.output_kinds())
    edges = {(part.name, edge) for plan in plans for part in plan.stages for edge in part.edges}
    assert edges == {(stage.name, i) for stage in pipeline.stages for i in range(len(stage.inputs))}
    assert all(edge.parts for stage in pipeline.stages for edge in stage.inputs if edge.source == REQUEST)
    assert [spec.stage for spec in resolve(name, AppArgs()).stages] == [s.name for s in pipeline.topological()]


@names
def test_its_checkpoint_leads_back_to_it(name: str, runner: Runner) -> None:
    """``omni-ray serve DIR`` takes what ``omni-ray checkpoint NAME --tiny DIR`` made."""
    if (pipeline := load_pipeline(name)).untried is not None:
        pytest.skip(f"{name}: {pipeline.untried}")
    made = runner.checkpoint(pipeline)
    if made is not None:
        assert select_for_checkpoint(str(made)).pipeline == pipeline.name


@names
@one_loop
async def test_streamed_equals_one_call(name: str, runner: Runner) -> None:
    """Text and tokens exactly; samples within 1e-5 of the peak, and exactly if the codec only speaks whole."""
    running = await runner.run(name)
    models = [OmniModelRegistry.load(spec.model_arch) for spec in running.app.stages]
    exact = all(model.streaming == "whole" for model in models if issubclass(model, Codec))
    for ask in asks(running.pipeline):
        streamed, whole = await running.alone(ask, 0), await running.answer(ask, 0, whole=True)
        assert streamed.same_but_for_sound(whole)
        assert len(streamed.sound) == len(whole.sound)
        if len(whole.sound):
            peak = np.abs(whole.sound).max()
            assert peak > 0
            assert np.abs(streamed.sound - whole.sound).max() <= (0 if exact else 1e-5 * peak)


@names
@one_loop
async def test_a_crowd_changes_nothing_and_hanging_up_leaves_nothing(name: str, runner: Runner) -> None:
    """Eight at once answer as each does alone, while others hang up after their first output."""
    running = await runner.run(name)
    kinds = asks(running.pipeline)
    assert kinds, "no request leads to anything"
    members = [(kinds[i % len(kinds)], i // len(kinds) % 2) for i in range(CROWD)]
    alone = [await running.alone(ask, number) for ask, number in members]
    await running.check_idle()
    for ask in kinds:
        if ask.parts & {"messages", "speech_text", "image_prompt"}:  # else a swap of two answers would not show
            assert not (await running.alone(ask, 0)).same(await running.alone(ask, 1))
    leaving = [running.answer(ask, 2, most=1) for ask in kinds]
    *together, _ = await asyncio.gather(*(running.answer(ask, n) for ask, n in members), asyncio.gather(*leaving))
    for own, crowded in zip(alone, together, strict=True):
        assert crowded.same(own)
    await running.check_idle()
