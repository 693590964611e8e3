"""The registry: names, aliases, checkpoints, plugins; and that every wrong name is answered with the nearest known."""

import importlib.metadata
import json
import os
import sys
import types
from collections.abc import Callable, Iterator

import pytest
from pydantic import BaseModel

from omni_ray import plugins, registry
from omni_ray.config.hf_config import read_hf_config
from omni_ray.config.pipeline import Edge, PipelineConfig, StageExecutionType, StagePipelineConfig
from omni_ray.engine.options import AROptions, CodecOptions, EngineOptions
from omni_ray.engine.vllm_options import VLLMOptions
from omni_ray.errors import ConfigError
from omni_ray.plugins import load_plugins
from omni_ray.registry import (
    ENGINES,
    ModelExtras,
    OmniModelRegistry,
    engine_entry,
    engine_options,
    extras_for,
    import_dotted,
    load_pipeline,
    pipeline_names,
    register_extras,
    register_pipeline,
)


@pytest.fixture(autouse=True)
def _tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test gets copies of the global tables; the originals come back."""
    for table in ("OMNI_PIPELINES", "_MODELS", "_EXTRAS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    monkeypatch.setattr(plugins, "_loaded_plugins", set(plugins._loaded_plugins))
    monkeypatch.delenv("OMNI_RAY_PLUGINS", raising=False)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An importable module to hang declarations on."""
    made = types.ModuleType("declared_in_a_test")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def stage(name: str = "talker", **changes: object) -> StagePipelineConfig:
    given: dict[str, object] = {
        "name": name,
        "execution_type": StageExecutionType.LLM_AR,
        "model_arch": "RampTalker",
        "inputs": (Edge(source="request", parts=("speech_text",), processor="a.b:c"),),
        "final_output_type": "audio",
    }
    return StagePipelineConfig.model_validate(given | changes)


def pipeline(name: str, **changes: object) -> PipelineConfig:
    return PipelineConfig.model_validate({"name": name, "description": "x", "stages": (stage(),)} | changes)


def add(module: types.ModuleType, declared: PipelineConfig | Callable[..., PipelineConfig], name: str) -> str:
    setattr(module, name.upper(), declared)
    register_pipeline(name, f"declared_in_a_test:{name.upper()}")
    return name


def problems(call: Callable[[], object]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        call()
    return caught.value.problems


def test_every_registered_pipeline_loads_and_keeps_its_name():
    for name in pipeline_names():
        assert load_pipeline(name).name == name


def test_unknown_pipeline_suggests_the_nearest():
    known = ", ".join(sorted(registry.OMNI_PIPELINES))
    assert problems(lambda: load_pipeline("rampp")) == (
        f"unknown pipeline 'rampp'; did you mean 'ramp'? known: {known}",
    )
    assert problems(lambda: load_pipeline("zzz")) == (f"unknown pipeline 'zzz'; known: {known}",)


def test_alias_selects(module: types.ModuleType):
    add(module, pipeline("qwen9", aliases=("qwen9_omni",)), "qwen9")
    assert load_pipeline("qwen9_omni").name == "qwen9"


def test_alias_of_two_pipelines_is_an_error(module: types.ModuleType):
    """Two packages that claim one alias: picking either would serve the wrong model to somebody."""
    add(module, pipeline("one", aliases=("both",)), "one")
    add(module, pipeline("two", aliases=("both",)), "two")
    assert problems(lambda: load_pipeline("both")) == ("'both' is an alias of several pipelines: one, two",)


def test_a_name_wins_over_anothers_alias(module: types.ModuleType):
    add(module, pipeline("other", aliases=("ramp",)), "other")
    assert load_pipeline("ramp").name == "ramp"


def test_registration_under_another_name_is_an_error(module: types.ModuleType):
    """`omni-ray build shadow` would write ``graphs:<declared name>``, which resolves elsewhere or nowhere."""
    add(module, pipeline("real"), "shadow")
    expected = "'declared_in_a_test:SHADOW' is registered as 'shadow' but declares the name 'real'"
    assert problems(lambda: load_pipeline("shadow")) == (expected,)


def test_register_pipeline_refuses_another_path_and_takes_the_same_twice():
    register_pipeline("mine", "a.b:C")
    register_pipeline("mine", "a.b:C")
    assert problems(lambda: register_pipeline("mine", "a.b:D")) == ("pipeline 'mine' is already registered as 'a.b:C'",)
    assert problems(lambda: register_pipeline("ramp", "a.b:D"))[0].startswith("pipeline 'ramp' is already registered")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("no_colon", "'no_colon' is no dotted path of the form 'package.module:attribute'"),
        ("no.such.module:X", "'no.such.module:X' cannot be imported: No module named 'no'"),
        (
            "omni_ray.errors:Nothing",
            "'omni_ray.errors:Nothing' cannot be imported: module 'omni_ray.errors' has no attribute 'Nothing'",
        ),
    ],
)
def test_dotted_path_errors_name_the_path(path: str, expected: str):
    assert problems(lambda: import_dotted(path)) == (expected,)


def test_broken_declaration_is_refused_with_all_its_problems(module: types.ModuleType):
    edge = Edge(source="request", processor="nocolon")
    add(module, pipeline("broken", stages=(stage("talkr", inputs=(edge,), final_output_type=None),)), "broken")
    found = problems(lambda: load_pipeline("broken"))
    assert len(found) == 3
    assert all("broken" in line for line in found)


class TestCheckpoints:
    """Resolving a pipeline for a checkpoint directory."""

    @pytest.fixture
    def checkpoint(self, tmp_path) -> Callable[..., str]:
        def make(name: str, **config: object) -> str:
            directory = tmp_path / name
            directory.mkdir()
            (directory / "config.json").write_text(json.dumps(config))
            return str(directory)

        return make

    def test_resolver_sees_the_config(self, module, checkpoint):
        """Qwen3-Omni without ``enable_audio_output`` becomes thinker-only."""

        def resolver(hf_config):
            if hf_config.get("enable_audio_output", True):
                return pipeline("omni")
            return pipeline("omni", stages=(stage("thinker", final_output_type="text"),))

        add(module, resolver, "omni")
        quiet = checkpoint("quiet", enable_audio_output=False)
        assert load_pipeline("omni", quiet).output_kinds() == ("text",)
        assert load_pipeline("omni", checkpoint("loud")).output_kinds() == ("audio",)
        assert load_pipeline("omni").output_kinds() == ("audio",)

    def test_variant_stands_in_for_the_files(self, module):
        """In a cluster the builder may run on a node without the files."""
        add(module, lambda config: pipeline("omni", description=str(config.get("x"))), "omni")
        assert load_pipeline("omni", "/nowhere", {"x": 7}).description == "7"
        assert load_pipeline("omni", "/nowhere", {}).description == "None", "an empty variant is a variant"

    def test_resolvers_aliases_are_those_of_its_default_variant(self, module):
        add(module, lambda config: pipeline("omni", aliases=("omni-instruct",)), "omni")
        assert load_pipeline("omni-instruct").name == "omni"

    def test_unreadable_config_names_node_and_path(self, module, tmp_path):
        add(module, lambda config: pipeline("omni"), "omni")
        (line,) = problems(lambda: load_pipeline("omni", str(tmp_path)))
        assert str(tmp_path / "config.json") in line
        assert f"on node {os.uname().nodename!r}" in line

    def test_garbled_config_names_the_path(self, tmp_path):
        (tmp_path / "config.json").write_text("{")
        (line,) = problems(lambda: read_hf_config(str(tmp_path)))
        assert f"cannot read {tmp_path / 'config.json'} on node" in line

    def test_plain_pipelines_do_not_read_the_checkpoint(self):
        assert load_pipeline("ramp", "/nowhere").name == "ramp"


class TestModels:
    """``OmniModelRegistry``."""

    def test_load_is_lazy(self, module):
        OmniModelRegistry.register("LaterForAudio", "declared_in_a_test:Later")
        assert OmniModelRegistry.known("LaterForAudio")
        assert problems(lambda: OmniModelRegistry.load("LaterForAudio"))[0].startswith(
            "'declared_in_a_test:Later' cannot"
        )
        module.Later = EngineOptions
        assert OmniModelRegistry.load("LaterForAudio") is EngineOptions

    def test_register_refuses_another_path(self):
        OmniModelRegistry.register("Mine", "a.b:C")
        OmniModelRegistry.register("Mine", "a.b:C")
        expected = "architecture 'Mine' is already registered as 'a.b:C'"
        assert problems(lambda: OmniModelRegistry.register("Mine", "a.b:D")) == (expected,)

    def test_unknown_suggests(self):
        (line,) = problems(lambda: OmniModelRegistry.load("RampTalkr"))
        assert line.startswith("unknown architecture 'RampTalkr'; did you mean 'RampTalker'? known: ")
        assert not OmniModelRegistry.known("RampTalkr")

    def test_architectures_lists_all(self):
        assert {"RampThinker", "RampTalker", "RampCode2Wav"} <= set(OmniModelRegistry.architectures())


class TestEngines:
    """Which engine a stage gets, and its option model."""

    @pytest.mark.parametrize(
        ("kind", "name"), [("llm_ar", "ar"), ("llm_generation", "codec"), ("diffusion", "diffusion")]
    )
    def test_execution_type_gives_the_default(self, kind: str, name: str):
        assert engine_entry(stage(execution_type=kind)) == (name, ENGINES[name])

    def test_deploy_config_chooses_among_the_allowed(self):
        two = stage(engine_choices=("per_request",))
        assert engine_entry(two, "per_request")[0] == "per_request"
        expected = "stages.talker.engine.name: 'codec' is not allowed here; known: ar, per_request"
        assert problems(lambda: engine_entry(two, "codec")) == (expected,)
        (line,) = problems(lambda: engine_entry(two, "per_requst"))
        assert "did you mean 'per_request'?" in line

    def test_unknown_declared_engine(self):
        (line,) = problems(lambda: engine_entry(stage(engine="xyz")))
        assert line == f"stage 'talker': unknown engine 'xyz'; {', '.join(sorted(ENGINES))}".replace(
            "; ", "; known: ", 1
        )

    def test_dotted_engine(self):
        name, entry = engine_entry(stage(engine="my.pkg:Engine"))
        assert (name, entry.path) == ("my.pkg:Engine", "my.pkg:Engine")
        assert engine_options(stage(engine="my.pkg:Engine")) is EngineOptions

    def test_option_models(self):
        assert engine_options(stage()) is AROptions
        assert engine_options(stage(execution_type="llm_generation")) is CodecOptions
        own = stage(engine_options="omni_ray.engine.options:CodecOptions", engine_choices=("vllm",))
        assert engine_options(own) is CodecOptions
        assert engine_options(own, "vllm") is VLLMOptions  # the stage's own are its declared engine's


class TestExtras:
    """Extra request fields by architecture."""

    def test_ramp_declares_its_field(self):
        assert set(extras_for(load_pipeline("ramp"))) == {"ramp"}

    def test_out_of_tree(self, module):
        class Style(BaseModel):
            mood: str

        module.EXTRAS = ModelExtras(fields={"style": Style})
        register_extras("RampTalker", "declared_in_a_test:EXTRAS")
        assert set(extras_for(load_pipeline("ramp"))) == {"ramp", "style"}
        expected = "extras of 'RampTalker' are already registered as 'declared_in_a_test:EXTRAS'"
        assert problems(lambda: register_extras("RampTalker", "a.b:c")) == (expected,)


class FakePlugin:
    """An entry point that counts its calls."""

    def __init__(self, name: str, calls: list[str], raises: Exception | None = None) -> None:
        self.name, self.value = name, f"pkg.{name}:register"
        self._calls, self._raises = calls, raises

    def load(self) -> Callable[[], None]:
        def call() -> None:
            self._calls.append(self.name)
            if self._raises is not None:
                raise self._raises

        return call


class TestPlugins:
    """Entry points, and the allow-list ``OMNI_RAY_PLUGINS``."""

    @pytest.fixture
    def installed(self, monkeypatch) -> Iterator[dict[str, list[FakePlugin]]]:
        groups: dict[str, list[FakePlugin]] = {}
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: groups.get(group, []))
        monkeypatch.setattr(plugins, "_loaded_plugins", set())
        return groups

    def test_all_run_once_platform_first(self, installed):
        calls: list[str] = []
        installed["omni_ray.general_plugins"] = [FakePlugin("a", calls), FakePlugin("b", calls)]
        installed["omni_ray.platform_plugins"] = [FakePlugin("p", calls)]
        load_plugins()
        load_plugins()
        assert calls == ["p", "a", "b"]

    @pytest.mark.parametrize(
        ("allowed", "expected"), [("b", ["b"]), ("", []), (" a , b ", ["a", "b"]), ("zzz", []), (",", [])]
    )
    def test_allow_list(self, installed, monkeypatch, allowed, expected):
        calls: list[str] = []
        installed["omni_ray.general_plugins"] = [FakePlugin("a", calls), FakePlugin("b", calls)]
        monkeypatch.setenv("OMNI_RAY_PLUGINS", allowed)
        load_plugins()
        assert calls == expected

    def test_plugin_registers_a_pipeline(self, installed, module):
        plugin = FakePlugin("x", [])
        plugin.load = lambda: lambda: add(module, pipeline("from_plugin"), "from_plugin")
        installed["omni_ray.general_plugins"] = [plugin]
        assert "from_plugin" in pipeline_names()
        assert load_pipeline("from_plugin").name == "from_plugin"

    def test_failing_plugin_stops_the_program_every_time(self, installed):
        """A second call used to go on without the plugin: a replica's retry then served a half-registered model."""
        calls: list[str] = []
        installed["omni_ray.general_plugins"] = [FakePlugin("bad", calls, RuntimeError("no CUDA"))]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no CUDA") as caught:
                load_plugins()
        assert calls == ["bad", "bad"]
        assert caught.value.__notes__[-1] == (
            "raised by plugin 'bad' (pkg.bad:register) of group 'omni_ray.general_plugins'"
        )
