"""Makes a tiny random Stable Diffusion 3 checkpoint in diffusers' layout: about 0.4 M parameters, its own tokenizer."""

from pathlib import Path


def make_tiny(out: Path, seed: int = 0) -> None:
    """Write the checkpoint; equal seeds give equal files.

    As published ones may, it leaves out the T5 text encoder; the other two are transformers' CLIP. Its tokenizer knows
    bytes and no merges; its pictures are 64 pixels wide and high unless asked otherwise.

    Args:
        out: made if need be; files of the same names are replaced.
        seed: of the weights.
    """
    import torch
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=77)
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=32,
        bos_token_id=len(words) - 2,
        eos_token_id=len(words) - 1,
        pad_token_id=len(words) - 1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(
                sample_size=32,
                patch_size=1,
                in_channels=4,
                out_channels=4,
                num_layers=1,
                attention_head_dim=8,
                num_attention_heads=4,
                joint_attention_dim=32,
                caption_projection_dim=32,
                pooled_projection_dim=64,
                pos_embed_max_size=64,
            ),
            vae=AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                block_out_channels=(8, 16),
                latent_channels=4,
                norm_num_groups=4,
                sample_size=64,
                scaling_factor=1.5305,
                shift_factor=0.0609,
                use_quant_conv=False,
                use_post_quant_conv=False,
            ),
            text_encoder=CLIPTextModelWithProjection(config),
            text_encoder_2=CLIPTextModelWithProjection(config),
            tokenizer=tokenizer,
            tokenizer_2=tokenizer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            text_encoder_3=None,
            tokenizer_3=None,
        )
        pipeline.save_pretrained(out, safe_serialization=True)
