"""Each stage reads exactly its own tensors, equal to the full upstream load; anything else stops the start by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeTalkerForConditionalGeneration,
)

from omni_ray.engine.checkpoint_files import INDEX, SINGLE, checkpoint_directory, load_parts, read_tensor
from omni_ray.engine.transformers_build import build
from omni_ray.errors import ConfigError
from omni_ray.models.qwen3_omni.thinker import ThinkerParts
from omni_ray.models.qwen3_omni.weights import initialise_experts

EXPERT = "talker.model.layers.1.mlp.experts.2.up_proj.weight"
STAGES = ("thinker", "talker", "code2wav")


def module_of(stage: str, directory: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The stage's module as its stage builds it, filled with NaN: what is not read stays visible."""
    config = Qwen3OmniMoeConfig.from_pretrained(directory)
    module: nn.Module
    if stage == "thinker":
        module = ThinkerParts(config.thinker_config, dtype, initialise=False)
    elif stage == "talker":
        module = build(Qwen3OmniMoeTalkerForConditionalGeneration, config.talker_config, dtype, initialise=False)
    else:
        module = build(Qwen3OmniMoeCode2Wav, config.code2wav_config, dtype, initialise=False)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    return module


def published_names(module: nn.Module) -> dict[str, Tensor]:
    """State of a whole upstream model; from 5.20 on the thinker's parts lie one level deeper than in checkpoints."""
    moved = {
        "thinker.model.language_model.": "thinker.model.",
        "thinker.model.audio_tower.": "thinker.audio_tower.",
        "thinker.model.visual.": "thinker.visual.",
    }
    named = {}
    for name, tensor in module.state_dict().items():
        for there, here in moved.items():
            if name.startswith(there):
                name = here + name.removeprefix(there)
        named[name] = tensor
    return named


@pytest.mark.parametrize("stage", STAGES)
def test_every_parameter_equals_the_full_upstream_load(stage: str, tiny_checkpoint: Path, upstream: Any) -> None:
    module = module_of(stage, tiny_checkpoint)
    lines: list[str] = []
    load_parts(tiny_checkpoint, module, f"{stage}.", lines.append)
    whole = {name: value for name, value in published_names(upstream).items() if name.startswith(f"{stage}.")}
    ours = {f"{stage}.{name}": value for name, value in module.state_dict().items()}
    assert ours.keys() == whole.keys()
    for name, value in ours.items():
        assert torch.equal(value, whole[name]), name
    for name, buffer in module.named_buffers():  # tables that no checkpoint holds
        assert torch.isfinite(buffer).all(), name
    assert len(lines) == 1
    assert "(1/1)" in lines[0]


def shard(source: Path, out: Path, prefixes: tuple[str, ...] = STAGES) -> None:
    """The checkpoint in three files and an index; files of stages that are not in ``prefixes`` are not there."""
    out.mkdir()
    tensors = load_file(source / SINGLE)
    placed = {name: f"model-{STAGES.index(name.split('.')[0])}.safetensors" for name in tensors}
    for stage in prefixes:
        own = {name: value for name, value in tensors.items() if name.startswith(f"{stage}.")}
        save_file(own, out / f"model-{STAGES.index(stage)}.safetensors")
    (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (out / "config.json").write_bytes((source / "config.json").read_bytes())


def test_a_stage_opens_only_its_own_shards(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shard(tiny_checkpoint, tmp_path / "sharded", ("talker",))
    module = module_of("talker", tmp_path / "sharded")
    load_parts(tmp_path / "sharded", module, "talker.", print)
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    assert read_tensor(tmp_path / "sharded", "talker.codec_head.weight").shape == (1120, 24)
    with pytest.raises(ConfigError, match=r"shards are missing: .*model-2.safetensors"):
        load_parts(tmp_path / "sharded", module_of("code2wav", tmp_path / "sharded"), "code2wav.", print)
    with pytest.raises(ConfigError, match=r"shards are missing: .*model-0.safetensors"):
        read_tensor(tmp_path / "sharded", "thinker.model.embed_tokens.weight")


Change = Callable[[dict[str, Tensor]], None]


@pytest.fixture
def changed(tiny_checkpoint: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """A copy of the checkpoint with changed tensors."""

    def make(change: Change) -> Path:
        tensors = load_file(tiny_checkpoint / SINGLE)
        change(tensors)
        save_file(tensors, tmp_path / SINGLE)
        (tmp_path / "config.json").write_bytes((tiny_checkpoint / "config.json").read_bytes())
        return tmp_path

    return make


def fuse(tensors: dict[str, Tensor]) -> None:
    """Experts of all layers as transformers' modules hold them."""
    for down in [name for name in tensors if name.endswith("experts.0.down_proj.weight")]:
        experts = down.removesuffix(".0.down_proj.weight")
        parts = {
            part: [tensors.pop(f"{experts}.{index}.{part}.weight") for index in range(4)]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        tensors[f"{experts}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{experts}.down_proj"] = torch.stack(parts["down_proj"])


def test_fused_experts_are_read_too(changed: Callable[[Change], Path], tiny_checkpoint: Path) -> None:
    apart, together = module_of("talker", tiny_checkpoint), module_of("talker", tiny_checkpoint)
    load_parts(tiny_checkpoint, apart, "talker.", print)
    load_parts(changed(fuse), together, "talker.", print)
    for name, value in apart.state_dict().items():
        assert torch.equal(value, together.state_dict()[name]), name


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop("talker.model.norm.weight"), "1 tensors are missing: talker.model.norm.weight"),
        (lambda t: t.pop(EXPERT), f"1 tensors are missing: {EXPERT}"),
        (lambda t: t.update({"talker.model.extra": torch.zeros(1)}), "1 tensors are unexpected: talker.model.extra"),
        (
            lambda t: t.update({EXPERT.replace("experts.2", "experts.4"): torch.zeros(16, 24)}),
            f"1 tensors are unexpected: {EXPERT.replace('experts.2', 'experts.4')}",
        ),
        (
            lambda t: t.update({EXPERT: torch.zeros(16, 25)}),
            rf"{EXPERT} is \[16, 25\], not \[16, 24\]",
        ),
        (
            lambda t: t.update({"talker.codec_head.weight": torch.zeros(4, 24)}),
            r"talker.codec_head.weight is \[4, 24\], not \[1120, 24\]",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if ".experts." in name],
            "6 tensors are missing: talker.model.layers.0.mlp.experts.gate_up_proj",
        ),
    ],
)
def test_a_wrong_tensor_stops_the_start(change: Change, problem: str, changed: Callable[[Change], Path]) -> None:
    directory = changed(change)
    with pytest.raises(ConfigError, match=problem):
        load_parts(directory, module_of("talker", directory), "talker.", print)


def test_what_is_not_there_is_named(tmp_path: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=f"neither {INDEX} nor {SINGLE}"):
        load_parts(tmp_path, nn.Linear(1, 1), "talker.", print)
    with pytest.raises(ConfigError, match=r"no tensor begins with 'listener\."):
        load_parts(tiny_checkpoint, nn.Linear(1, 1), "listener.", print)
    with pytest.raises(ConfigError, match=r"'thinker\.model\.nothing' is missing"):
        read_tensor(tiny_checkpoint, "thinker.model.nothing")


def test_values_take_the_modules_type(tiny_checkpoint: Path) -> None:
    module = module_of("code2wav", tiny_checkpoint, torch.bfloat16)
    load_parts(tiny_checkpoint, module, "code2wav.", print)
    half = read_tensor(tiny_checkpoint, "code2wav.decoder.0.conv.weight").bfloat16()
    assert torch.equal(module.get_parameter("decoder.0.conv.weight"), half)


def test_tied_parameters_need_one_tensor(changed: Callable[[Change], Path]) -> None:
    directory = changed(lambda tensors: tensors.__delitem__("thinker.lm_head.weight"))
    config = json.loads((directory / "config.json").read_text())
    config["thinker_config"]["tie_word_embeddings"] = True
    (directory / "config.json").write_text(json.dumps(config))
    module = module_of("thinker", directory)
    load_parts(directory, module, "thinker.", print)
    assert torch.equal(module.get_parameter("lm_head.weight"), module.get_parameter("model.embed_tokens.weight"))


def test_dummy_weights_leave_no_expert_out(tiny_checkpoint: Path) -> None:
    """In upstream's own random init of a talker the routers are zero."""
    config = Qwen3OmniMoeConfig.from_pretrained(tiny_checkpoint).talker_config
    made = []
    for _ in range(2):
        talker = build(Qwen3OmniMoeTalkerForConditionalGeneration, config, torch.float32, initialise=True)
        initialise_experts(talker, 0.3, seed=5)
        made.append(talker.model.layers)
    for one, two in zip(*made, strict=True):
        for part in ("experts.gate_up_proj", "experts.down_proj", "gate.weight"):
            first, second = one.mlp.get_parameter(part), two.mlp.get_parameter(part)
            assert torch.equal(first, second)
            assert 0.2 < float(first.detach().std()) < 0.4


def test_a_model_is_a_directory_or_a_hub_id(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoint_directory(str(tiny_checkpoint)) == tiny_checkpoint
    for wrong in ("/nowhere/at-all", "no-such-directory", "a/b/c"):
        with pytest.raises(ConfigError, match="is no directory on this node"):
            checkpoint_directory(wrong)
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or tiny_checkpoint)
    assert checkpoint_directory("owner/name") == tiny_checkpoint
    assert asked == ["owner/name"]

    def offline(name: str, **_: Any) -> None:
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ConfigError, match="the hub does not give it: offline"):
        checkpoint_directory("owner/name")
