"""VoxCPM2 through the generator of its own package, ``voxcpm`` (MODEL-INV-003: upstream's code as it is).

``VoxCPM2Model.generate_streaming`` yields the sound of one patch after the other, float32 [1, n]; its codec carries its
convolutions' past on the modules while the generator is open, and takes it off when that is closed.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import soundfile
import torch
from safetensors import safe_open

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.checkpoint_files import stage_directory
from omni_ray.engine.generator import GeneratorModel
from omni_ray.engine.generator_run import Job, Piece
from omni_ray.engine.reference_voice import reference_voice
from omni_ray.engine.types import Request
from omni_ray.errors import ConfigError, InvalidRequestError
from omni_ray.models.voxcpm2.options import VoxOptions

ADVICE = "give the stage ray_actor_options: {runtime_env: {pip: [voxcpm==2.0.3]}}, or install it on every node"


class VoxCPM2(GeneratorModel):
    """Text in; float32 pieces [1, n] at the checkpoint's rate (48 kHz) out."""

    def load(self) -> None:
        """Load the model by its package, and speak a little.

        Raises:
            ConfigError: no model, the package is not there, or the checkpoint lacks a tensor: upstream would leave it
                random.
        """
        options = self.context.options
        assert isinstance(options, VoxOptions)
        directory = stage_directory(self.context)
        torch.set_num_threads(options.threads)
        if self.context.load_format == "dummy":
            self._model = built(directory, options.device)
        else:
            upstream = upstream_class()
            self._model = upstream.from_local(str(directory), optimize=options.optimize, device=options.device)
            if missing := sorted(set(self._model.state_dict()) - _tensors(directory)):
                raise ConfigError([f"{directory}: {len(missing)} tensors are missing: {', '.join(missing[:5])}"])
        self._options = options
        self.sample_rate = int(self._model.sample_rate)
        self.samples_per_token = int(self._model.patch_size * self._model._decode_chunk_size)
        self._heard_at = int(self._model._encode_sample_rate)
        self.context.progress("weights are loaded")
        warm_up = Request("warm-up", seed=0, sampling=SamplingParams(max_tokens=2))
        with tempfile.TemporaryDirectory() as scratch:
            for _ in self.speak(Job(warm_up, ["Hello."], Path(scratch))):
                pass

    def speak(self, job: Job) -> Iterator[Piece]:
        """See ``GeneratorModel.speak``. A recording with its text is continued, one without lends its voice.

        Raises:
            InvalidRequestError: nothing to say.
        """
        (text,) = job.inputs
        if not text.strip():
            raise InvalidRequestError("input: there is nothing to say", "input")
        recording, said, reference = "", "", reference_voice(job.request.extras, self._heard_at)
        if reference is not None:
            recording = str(job.scratch / "reference.wav")
            soundfile.write(recording, reference.samples, self._heard_at)
            said = reference.text or ""
        most = int(job.request.max_audio_seconds * self.sample_rate / self.samples_per_token) + 1
        sounds = self._model.generate_streaming(
            text,
            prompt_text=said,
            prompt_wav_path=recording if said else "",
            reference_wav_path="" if said else recording,
            min_len=0,
            max_len=min(most, job.request.sampling.max_tokens or most),
            inference_timesteps=self._options.inference_timesteps,
            cfg_value=self._options.cfg_value,
        )
        try:
            for sound in sounds:
                yield Piece(sound.float().numpy())
        finally:
            sounds.close()  # takes the codec's state off the modules, whoever still refers to the generator


def upstream_class() -> Any:
    """``VoxCPM2Model``.

    Raises:
        ConfigError: the package, or one that it needs, cannot be imported here.
    """
    try:
        from voxcpm.model.voxcpm2 import VoxCPM2Model  # type: ignore[import-not-found]
    except (ImportError, OSError) as error:  # torchaudio without the libraries it was built for is an OSError
        raise ConfigError([f"voxcpm cannot be imported ({error}); {ADVICE}"]) from error
    return VoxCPM2Model


def built(directory: Path, device: str) -> Any:
    """A random ``VoxCPM2Model`` of the checkpoint's configuration, in evaluation mode.

    As its own ``from_local`` without the weights, and with the same tokenizer, transformers' ``LlamaTokenizerFast``.
    """
    upstream = upstream_class()
    from transformers import LlamaTokenizerFast
    from voxcpm.model.utils import get_dtype  # type: ignore[import-not-found]
    from voxcpm.model.voxcpm2 import AudioVAEV2, VoxCPMConfig

    config = VoxCPMConfig.model_validate_json((directory / "config.json").read_text())
    codec = AudioVAEV2(config=config.audio_vae_config) if config.audio_vae_config else AudioVAEV2()
    model = upstream(config, LlamaTokenizerFast.from_pretrained(directory), codec, device=device)
    model = model.to(get_dtype(model.config.dtype)).to(device).eval()
    model.audio_vae.float()
    return model


def _tensors(directory: Path) -> set[str]:
    """Names of all tensors that upstream reads there, as it names them."""
    names: set[str] = set()
    for stem, prefix in (("model", ""), ("audiovae", "audio_vae.")):
        if (file := directory / f"{stem}.safetensors").is_file():
            with safe_open(file, framework="pt") as tensors:
                names |= {prefix + name for name in tensors.keys()}  # noqa: SIM118 not a mapping
        else:
            file = directory / ("pytorch_model.bin" if stem == "model" else "audiovae.pth")
            held = torch.load(file, map_location="meta", weights_only=True)
            names |= {prefix + name for name in held.get("state_dict", held)}
    return names
