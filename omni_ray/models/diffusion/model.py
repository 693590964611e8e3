"""A text-to-image pipeline of diffusers as it is (MODEL-INV-003), with transformers' text encoders; loaded strictly."""

import copy
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, cast

import numpy as np
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, ModelMixin
from torch import Tensor, nn
from transformers import PreTrainedModel

from omni_ray.engine.diffusion import DiffusionModel
from omni_ray.engine.diffusion_run import Painted, Pixels, Stepped
from omni_ray.engine.options import DiffusionOptions
from omni_ray.engine.types import ImagePrompt
from omni_ray.errors import ConfigError, InvalidRequestError, StageFailedError
from omni_ray.models.diffusion.index import component_class, read_index

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WARM_UP: Final = ImagePrompt("warm-up", steps=2)


class DiffusersTextToImage(DiffusionModel):
    """Calls the pipeline class that the checkpoint's ``model_index.json`` names.

    A call changes its pipeline, its scheduler and its tokenizers' settings, so every thread has copies of all of them.
    """

    def load(self) -> None:
        """Load all parts from safetensors files and paint two steps of a picture.

        Raises:
            ConfigError: no model, one that is not allowed here, or a tensor is missing, unexpected or not finite.
        """
        options, stage = self.context.options, self.context.stage.name
        assert isinstance(options, DiffusionOptions)
        self._options = options
        if self.context.model is None:
            raise ConfigError([f"stage {stage} needs a model: a checkpoint directory or hub id"])
        if self.context.load_format == "dummy":
            raise ConfigError([f"stage {stage}: load_format dummy is not known; make a checkpoint with --tiny instead"])
        torch.set_num_threads(options.threads)
        directory = Path(self.context.model)
        if not directory.is_dir():
            directory = Path(DiffusionPipeline.download(self.context.model, use_safetensors=True))
        index = self._index = read_index(directory)
        dtype = _DTYPES[options.dtype]
        parts: dict[str, Any] = dict.fromkeys(index.absent)
        for name, named in index.components.items():
            found = component_class(*named)
            if found is not None and issubclass(found, PreTrainedModel | ModelMixin):
                parts[name] = _loaded(found, directory / name, dtype)
        try:
            self._pipeline: Any = index.pipeline.from_pretrained(
                directory, dtype=dtype, use_safetensors=True, local_files_only=True, **parts
            )
        except (OSError, ValueError) as error:
            raise ConfigError([f"{directory}: {error}"]) from error
        _check_finite(directory, self._pipeline.components)
        self._pipeline.set_progress_bar_config(disable=True)
        self._pipeline.to(options.device)
        self.context.progress(f"{index.pipeline.__name__}: weights are loaded")
        self._idle: SimpleQueue[Any] = SimpleQueue()
        for _ in range(options.max_num_seqs):
            self._idle.put(_own_copy(self._pipeline))
        self.paint(self.completed(_WARM_UP), 0, lambda step, steps, preview: None)

    def completed(self, prompt: ImagePrompt) -> ImagePrompt:
        """See ``DiffusionModel.completed``. A size of None is the pipeline's own affair."""
        for field, value, argument in (
            ("negative_prompt", prompt.negative, "negative_prompt"),
            ("guidance_scale", prompt.guidance_scale, "guidance_scale"),
            ("true_cfg_scale", prompt.true_cfg_scale, "true_cfg_scale"),
            ("size", prompt.width, "width"),
        ):
            if value is not None and argument not in self._index.takes:
                raise InvalidRequestError(f"{field}: this model ({self._index.pipeline.__name__}) takes none", field)
        multiple = 2 * self._latent_factor()
        if prompt.width is not None and (prompt.width % multiple or (prompt.height or 0) % multiple):
            raise InvalidRequestError(f"size: width and height must be multiples of {multiple} here", "size")
        guidance = prompt.guidance_scale
        if guidance is None and "guidance_scale" in self._index.takes:
            guidance = self._options.guidance_scale
        return replace(prompt, steps=prompt.steps or self._options.num_inference_steps, guidance_scale=guidance)

    def paint(self, prompt: ImagePrompt, seed: int, stepped: Stepped) -> Painted:
        """See ``DiffusionModel.paint``: one call of a pipeline that no other thread has, with its own generator.

        Raises:
            StageFailedError: the picture holds NaN or infinity.
        """
        pipeline = self._idle.get()
        try:
            return self._call(pipeline, prompt, seed, stepped)
        finally:
            self._idle.put(pipeline)

    def _call(self, pipeline: Any, prompt: ImagePrompt, seed: int, stepped: Stepped) -> Painted:
        pipeline.scheduler = copy.deepcopy(self._pipeline.scheduler)
        places = 0

        def on_step(called: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            nonlocal places
            latents = tensors["latents"]
            places = latents.shape[1] if latents.ndim == 3 else latents.shape[-1] * latents.shape[-2]
            stepped(step + 1, max(step + 1, len(pipeline.scheduler.timesteps)), lambda: self._preview(latents))
            return {}

        arguments = {
            "negative_prompt": prompt.negative,
            "width": prompt.width,
            "height": prompt.height,
            "num_inference_steps": prompt.steps,
            "guidance_scale": prompt.guidance_scale,
            "true_cfg_scale": prompt.true_cfg_scale,
        }
        images = pipeline(
            prompt=prompt.text,
            generator=torch.Generator("cpu").manual_seed(seed),
            output_type="np",
            callback_on_step_end=on_step,
            **{name: value for name, value in arguments.items() if value is not None},
        ).images
        return Painted(_pixels(images[0]), _prompt_tokens(pipeline.components.get("tokenizer"), prompt.text), places)

    def _preview(self, latents: Tensor) -> Pixels | None:
        """What a step's latents decode to, where they are a picture of the latent space as ``AutoencoderKL`` has it."""
        vae = self._pipeline.components.get("vae")
        if not isinstance(vae, AutoencoderKL) or latents.ndim != 4 or latents.shape[1] != vae.config.latent_channels:
            return None
        scaled = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0)
        decoded = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return _pixels(self._pipeline.image_processor.postprocess(decoded, output_type="np")[0])

    def _latent_factor(self) -> int:
        """Pixels per place of the latent, in each direction."""
        return cast(int, vars(self._pipeline).get("vae_scale_factor", 8))


def _own_copy(pipeline: Any) -> Any:
    """The same weights, and nothing else in common."""
    own = copy.copy(pipeline)
    parts = {name: part for name, part in pipeline.components.items() if not isinstance(part, nn.Module)}
    own.register_modules(**copy.deepcopy(parts))
    return own


def _prompt_tokens(tokenizer: Any, text: str) -> int:
    """As the first tokenizer counts them, as many as its model reads; 0 if there is none."""
    return 0 if tokenizer is None else min(len(tokenizer(text).input_ids), tokenizer.model_max_length)


def _loaded(cls: Any, directory: Path, dtype: torch.dtype) -> nn.Module:
    """A part with weights. The pipeline's own loader would only warn of missing tensors, and leave them as they are."""
    options: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
    try:
        model, info = cls.from_pretrained(directory, dtype=dtype, **options)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{directory}: {error}"]) from error
    problems = [f"{directory}: {kind} {sorted(map(str, found))[:5]}" for kind, found in info.items() if found]
    if problems:
        raise ConfigError(problems)
    loaded: nn.Module = model.eval()
    return loaded


def _check_finite(directory: Path, components: dict[str, Any]) -> None:
    broken = [
        f"{directory}: {name}.{key} is not finite"
        for name, part in components.items()
        if isinstance(part, nn.Module)
        for key, tensor in part.named_parameters()
        if not tensor.isfinite().all()
    ]
    if broken:
        raise ConfigError(broken[:5])


def _pixels(picture: Any) -> Pixels:
    """uint8 of a float picture [height, width, 3] in [0, 1], rounded as diffusers' ``numpy_to_pil`` does."""
    if not np.isfinite(picture).all():
        raise StageFailedError("the model made a picture with NaN or infinity in it")
    pixels: Pixels = (picture * 255).round().astype(np.uint8)
    return pixels
