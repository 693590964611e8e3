"""``diffusion`` on other classes than its maker's: a UNet whose scheduler keeps state, and packed latents."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PNDMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel

from omni_ray.engine.base import EngineContext
from omni_ray.engine.diffusion import DiffusionEngine
from omni_ray.engine.options import DiffusionOptions
from omni_ray.engine.types import Finish, ImageChunk, ImagePrompt, Request
from omni_ray.models.diffusion.checkpoint import make_tiny
from omni_ray.models.diffusion.model import DiffusersTextToImage
from omni_ray.models.diffusion.pipeline import PIPELINE


def text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    last = len(tokenizer) - 1
    config = CLIPTextConfig(
        vocab_size=last + 1, hidden_size=32, intermediate_size=37, num_hidden_layers=1, num_attention_heads=4,
        projection_dim=32, bos_token_id=last - 1, eos_token_id=last, pad_token_id=last,
    )  # fmt: skip
    return CLIPTextModel(config)


def autoencoder(channels: int) -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16), latent_channels=channels, norm_num_groups=4, sample_size=32,
        scaling_factor=1.5, shift_factor=0.06,
    )  # fmt: skip


def stable_diffusion(tokenizer: CLIPTokenizer) -> StableDiffusionPipeline:
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=32,
        attention_head_dim=2, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return StableDiffusionPipeline(
        autoencoder(4), text_encoder(tokenizer), tokenizer, unet, PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def flux(tokenizer: CLIPTokenizer) -> FluxPipeline:
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    t5 = T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
    return FluxPipeline(
        FlowMatchEulerDiscreteScheduler(), autoencoder(4), text_encoder(tokenizer), tokenizer, T5EncoderModel(t5),
        tokenizer, transformer,
    )  # fmt: skip


@pytest.mark.parametrize(("make", "places", "previews"), [(stable_diffusion, 16 * 16, 1), (flux, 8 * 8, 0)])
async def test_other_classes_paint_as_upstream(tmp_path: Path, make: Any, places: int, previews: int):
    """Bit for bit. Flux packs its latents, so it is not seen on its way."""
    make_tiny(tmp_path / "sd3")
    torch.manual_seed(0)
    made = make(CLIPTokenizer.from_pretrained(tmp_path / "sd3" / "tokenizer"))
    made.save_pretrained(tmp_path / "other", safe_serialization=True)
    context = EngineContext(
        PIPELINE.stage("painter"), str(tmp_path / "other"), DiffusersTextToImage, DiffusionOptions()
    )
    engine = DiffusionEngine(context)
    await engine.start()
    prompt = ImagePrompt("a red cat", steps=4, width=32, height=32, guidance_scale=2.0, previews=1)

    async def inputs() -> AsyncIterator[ImagePrompt]:
        yield prompt

    async with aclosing(engine.generate(Request("r", seed=3), {"request": inputs()})) as outputs:
        *chunks, finish = [output async for output in outputs]
    arguments = {"num_inference_steps": 4, "width": 32, "height": 32, "guidance_scale": 2.0}
    loaded = type(made).from_pretrained(tmp_path / "other")  # what was just made is in training mode, with dropout
    upstream = loaded("a red cat", generator=torch.Generator("cpu").manual_seed(3), **arguments).images[0]
    pictures = [chunk for chunk in chunks if isinstance(chunk, ImageChunk)]
    assert [picture.preview for picture in pictures] == [True] * previews + [False]
    np.testing.assert_array_equal(pictures[-1].pixels, np.asarray(upstream))
    assert np.ptp(pictures[-1].pixels) > 20
    assert isinstance(finish, Finish)
    assert finish.usage.image_tokens == places
