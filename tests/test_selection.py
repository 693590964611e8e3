"""``omni-ray serve DIR_OR_HUB_ID``: the pipeline is chosen, and the reason is told."""

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_ray import registry
from omni_ray.cli import main
from omni_ray.errors import ConfigError
from omni_ray.registry import register_pipeline
from omni_ray.selection import Selection, select, select_for_checkpoint
from tests.test_registry import pipeline

Checkpoint = Callable[..., str]
Declare = Callable[..., None]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    def make(name: str, **config: object) -> str:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        return str(directory)

    return make


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Declare:
    """Register a pipeline for one test."""
    monkeypatch.setattr(registry, "OMNI_PIPELINES", dict(registry.OMNI_PIPELINES))
    monkeypatch.setattr("omni_ray.selection.OMNI_PIPELINES", registry.OMNI_PIPELINES)
    module = types.ModuleType("declared_for_selection")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def add(name: str, **fields: object) -> None:
        setattr(module, name, pipeline(name, **fields))
        register_pipeline(name, f"{module.__name__}:{name}")

    return add


def refusal(model: str) -> str:
    with pytest.raises(ConfigError) as caught:
        select_for_checkpoint(model)
    (line,) = caught.value.problems
    return line


def test_by_architecture(declare: Declare, checkpoint: Checkpoint):
    declare("arch", hf_architectures=("ArchForAll",))
    model = checkpoint("anything", architectures=["ArchForAll"])
    assert select(model) == Selection("arch", model, "architecture ArchForAll")


def test_by_model_type(declare: Declare, checkpoint: Checkpoint):
    declare("typed", hf_model_types=("arch_all",))
    model = checkpoint("anything", model_type="arch_all")
    assert select(model) == Selection("typed", model, "model_type arch_all")


@pytest.mark.parametrize("basename", ["Nemotron-VoiceChat", "nemotron-voicechat"])
def test_by_directory_name(declare: Declare, checkpoint: Checkpoint, basename: str):
    """Nemotron VoiceChat's checkpoint has neither architectures nor a ``model_type``."""
    declare("voice", checkpoint_basenames=("Nemotron-VoiceChat",))
    model = checkpoint(basename)
    assert select(model) == Selection("voice", model, f"directory name {basename}")


def test_an_architecture_overrules_a_directory_name(declare: Declare, checkpoint: Checkpoint):
    declare("one", hf_architectures=("A",))
    declare("two", checkpoint_basenames=("ckpt",))
    assert select(checkpoint("ckpt", architectures=["A"])).pipeline == "one"


def test_two_that_fit_are_an_error(declare: Declare, checkpoint: Checkpoint):
    declare("one", hf_architectures=("A",))
    declare("two", hf_architectures=("A", "B"))
    line = refusal(checkpoint("ckpt", architectures=["A"]))
    assert "several pipelines fit by architecture A: one, two; name one: PIPELINE model=" in line
    assert "architectures ['A'], model_type None, directory name 'ckpt'" in line


def test_nothing_fits(checkpoint: Checkpoint):
    line = refusal(checkpoint("ckpt", architectures=["Unheard"], model_type="unheard"))
    assert "(architectures ['Unheard'], model_type 'unheard', directory name 'ckpt'): no pipeline fits; " in line


@pytest.mark.parametrize("hostile", [None, {}, {"a": 1}, "lone", 7, [None, 3, ["x"]]])
def test_hostile_architectures_are_no_crash(checkpoint: Checkpoint, hostile: object):
    assert "no pipeline fits" in refusal(
        checkpoint("ckpt", architectures=hostile, model_type=["x"], talker_config=None)
    )


def test_a_config_that_is_no_mapping(tmp_path: Path):
    (tmp_path / "config.json").write_text("[]")
    assert "must hold a mapping" in refusal(str(tmp_path))


def test_a_registered_name_wins_over_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "ramp").mkdir()
    monkeypatch.chdir(tmp_path)
    assert select("ramp") == Selection("ramp")


def test_a_typing_error_is_no_checkpoint():
    assert select("rampp") == Selection("rampp"), "load_pipeline then names the nearest"


def test_plan_says_why(declare: Declare, checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]):
    declare("arch", hf_architectures=("ArchForAll",), sampled_outputs=())
    model = checkpoint("anything", architectures=["ArchForAll"])
    assert main(["plan", model, "model=other"]) == 2
    assert f"{model} is the model already" in capsys.readouterr().err
    main(["plan", model])
    assert f"{model}: pipeline arch, by architecture ArchForAll\n" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "chosen"), [("StableDiffusionPipeline", "diffusion"), ("AudioLDMPipeline", None)])
def test_a_model_index_in_place_of_a_config(tmp_path: Path, name: str, chosen: str | None):
    """diffusers' checkpoints have no ``config.json``; what makes no pictures of text is refused as before."""
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name, "_diffusers_version": "0.42.1"}))
    if chosen is None:
        assert "no pipeline fits" in refusal(str(tmp_path))
    else:
        assert select_for_checkpoint(str(tmp_path)).pipeline == chosen
