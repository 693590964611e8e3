"""The checkpoints that the stages of ``higgs_audio_v2`` start from: found, read and checked before any tensor is.

There are two, as published: the talker's, and the codec's, which the talker's ``processor_config.json`` names.
"""

import json
from pathlib import Path
from typing import Any, Final

from transformers import HiggsAudioV2Config, HiggsAudioV2TokenizerConfig

from omni_ray.engine.base import EngineContext
from omni_ray.engine.checkpoint_files import checkpoint_directory, stage_directory
from omni_ray.errors import ConfigError
from omni_ray.models.higgs_audio_v2.prompt import SAMPLE_RATE

CODEC_MODEL_TYPE: Final = "higgs_audio_v2_tokenizer"
PROCESSOR: Final = "processor_config.json"


def talker_checkpoint(context: EngineContext) -> tuple[Path, Any]:
    """The directory of the talker's checkpoint, and transformers' ``HiggsAudioV2Config`` of it.

    Raises:
        ConfigError: no model that can be had, or one whose ids for begin and end are no codes.
    """
    directory = stage_directory(context)
    config: Any = HiggsAudioV2Config.from_pretrained(directory)
    ids = (config.audio_stream_bos_id, config.audio_stream_eos_id)
    if not all(0 <= code < config.codebook_size for code in ids):
        raise ConfigError([f"{directory}: audio_stream_bos_id or _eos_id is not below codebook_size: {ids}"])
    return directory, config


def codec_checkpoint(context: EngineContext, codec: str | None) -> tuple[Path, Any]:
    """The directory of the codec's checkpoint, and transformers' ``HiggsAudioV2TokenizerConfig`` of it.

    Args:
        context: of the stage; its model is the talker's checkpoint, or the codec's own.
        codec: the stage's option of this name.

    Raises:
        ConfigError: none is named, it cannot be had, or it is another kind of codec.
    """
    directory = stage_directory(context)
    if codec is not None:
        directory = checkpoint_directory(codec)
    elif _model_type(directory) != CODEC_MODEL_TYPE:
        directory = _named_codec(directory)
    if _model_type(directory) != CODEC_MODEL_TYPE:
        raise ConfigError([f"{directory}: model_type is not {CODEC_MODEL_TYPE}"])
    config: Any = HiggsAudioV2TokenizerConfig.from_pretrained(directory)
    acoustic = config.acoustic_model_config
    wanted = {
        "sample_rate": (config.sample_rate, SAMPLE_RATE),
        "acoustic_model_config.model_type": (acoustic.model_type, "dac"),
        "semantic_model_config.model_type": (config.semantic_model_config.model_type, "hubert"),
        "acoustic_model_config.upsampling_ratios": (
            list(acoustic.upsampling_ratios),
            list(acoustic.downsampling_ratios),
        ),
    }
    problems = [f"{directory}: {key} is {is_}, not {must}" for key, (is_, must) in wanted.items() if is_ != must]
    if problems:
        raise ConfigError(problems)
    return directory, config


def _model_type(directory: Path) -> Any:
    path = directory / "config.json"
    try:
        return json.loads(path.read_text())["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"{path}: no config with a model_type: {error!r}"]) from error


def _named_codec(directory: Path) -> Path:
    """A directory inside the checkpoint, or a hub id; a checkpoint may name no other place on this machine."""
    path = directory / PROCESSOR
    try:
        name = json.loads(path.read_text())["audio_tokenizer"]["audio_tokenizer_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        name = None
    if isinstance(name, str) and (inside := directory / name).is_dir() and directory in inside.parents:
        if inside.resolve().is_relative_to(directory.resolve()):
            return inside
    elif isinstance(name, str) and name.count("/") == 1 and ".." not in name and not name.startswith("/"):
        return checkpoint_directory(name)
    raise ConfigError([f"{path}: names no codec (hub id or directory inside); set the stage's option engine.codec"])
