"""Qwen3-TTS through its own package, ``qwen-tts`` (MODEL-INV-003: upstream's code as it is).

``Qwen3TTSModel.generate_custom_voice`` gives the sound of a whole text; it does not stream. Models without speakers of
their own ("base", "voice_design") are refused.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from omni_ray.engine.generator import GeneratorModel
from omni_ray.engine.generator_run import Job, Piece
from omni_ray.errors import ConfigError, InvalidRequestError
from omni_ray.models.qwen3_tts.options import QwenTTSOptions

ADVICE = "give the stage ray_actor_options: {runtime_env: {pip: [qwen-tts==0.1.1]}}"
CODEC = "speech_tokenizer"


class Qwen3TTS(GeneratorModel):
    """Text in; one float32 piece [n] at the codec's rate (24 kHz) out."""

    def load(self) -> None:
        """Load the model and its codec by their package.

        Raises:
            ConfigError: no model, the package is not there, the checkpoint has no speakers or lacks a tensor: upstream
                would leave it random.
        """
        options = self.context.options
        assert isinstance(options, QwenTTSOptions)
        name = self.context.stage.name
        if self.context.model is None or not (directory := Path(self.context.model)).is_dir():
            raise ConfigError([f"stage {name} needs a model: a checkpoint directory on this node"])
        if self.context.load_format == "dummy":
            raise ConfigError([f"stage {name}: load_format: dummy is not possible; make a tiny checkpoint instead"])
        torch.set_num_threads(options.threads)
        upstream = upstream_class()
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
        self._model = upstream.from_pretrained(str(directory), device_map=options.device, dtype=dtype)
        talker, codec = self._model.model, self._model.model.speech_tokenizer
        if talker.tts_model_type != "custom_voice":
            raise ConfigError([f"{directory}: is a {talker.tts_model_type} model; only custom_voice has speakers"])
        for module, place in ((talker, directory), (codec.model, directory / CODEC)):
            if missing := sorted(set(module.state_dict()) - _tensors(place)):
                raise ConfigError([f"{place}: {len(missing)} tensors are missing: {', '.join(missing[:5])}"])
        self.sample_rate = int(codec.model.get_output_sample_rate())
        self.samples_per_token = int(codec.model.get_decode_upsample_rate())
        self.context.progress("weights are loaded")

    def speak(self, job: Job) -> Iterator[Piece]:
        """See ``GeneratorModel.speak``.

        Raises:
            InvalidRequestError: nothing to say.
        """
        (text,) = job.inputs
        if not text.strip():
            raise InvalidRequestError("input: there is nothing to say", "input")
        sampling = job.request.sampling
        most = int(job.request.max_audio_seconds * self.sample_rate / self.samples_per_token) + 1
        sounds, _ = self._model.generate_custom_voice(
            text,
            speaker=job.request.voice,
            language="Auto",
            non_streaming_mode=True,
            max_new_tokens=min(most, sampling.max_tokens or most),
            do_sample=sampling.temperature != 0,
            subtalker_dosample=sampling.temperature != 0,
            temperature=sampling.temperature or 1.0,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            repetition_penalty=sampling.repetition_penalty,
        )
        yield Piece(sounds[0], whole=True)


def upstream_class() -> Any:
    """``Qwen3TTSModel``.

    Raises:
        ConfigError: the package, or one that it needs, cannot be imported here.
    """
    try:
        from qwen_tts import Qwen3TTSModel  # type: ignore[import-not-found]
    except (ImportError, OSError) as error:  # torchaudio without the libraries it was built for is an OSError
        raise ConfigError([f"qwen-tts cannot be imported ({error}); {ADVICE}"]) from error
    return Qwen3TTSModel


def _tensors(directory: Path) -> set[str]:
    """Names of all tensors in a directory's safetensors files."""
    names: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names |= set(tensors.keys())
    return names
