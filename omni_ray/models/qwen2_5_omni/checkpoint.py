"""Makes a tiny random Qwen2.5-Omni checkpoint for CPU. Nothing is downloaded.

It has the layout of a published one, speakers included, so that both load with the same code. Modules and their
initialisation are transformers'.
"""

import json
import math
from pathlib import Path
from typing import Any, Final

from omni_ray.models.qwen2_5_omni.tiny_config import (
    CODES,
    MEL,
    SPEAKER_WIDTH,
    TEXT_CONTROL,
    preprocessor_config,
    tiny_config,
)

LOUDNESS: Final = 0.05
"""Root mean square of the sound of random codes, within a factor of 1.5."""
SPEAKERS: Final = ("Chelsie", "Ethan")


def make_tiny(out: Path, seed: int = 0) -> None:
    """Write a random checkpoint of some 0.3 M parameters; equal seeds give equal tensors.

    Answers are ASCII text without special tokens, so they never end by themselves; speech may end, but rarely.

    Args:
        out: made if need be; files of the same names are replaced.
        seed: of the weights and the speakers.
    """
    import torch
    from transformers import GenerationConfig, Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    from omni_ray.engine.transformers_build import BUILDING
    from omni_ray.engine.transformers_qwen_tokenizer import token_id
    from omni_ray.models.qwen2_5_omni.speakers import SPEAKER_FILE
    from omni_ray.models.qwen2_5_omni.tokenizer import SPECIAL_TOKENS, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    config = Qwen2_5OmniConfig(**tiny_config(lambda text: token_id(tokenizer, text), len(tokenizer)))
    with BUILDING, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = Qwen2_5OmniForConditionalGeneration(config).eval().float()
        words = [index for text, index in tokenizer.get_vocab().items() if text not in SPECIAL_TOKENS]
        _only(model.thinker.lm_head.weight, [i for i in words if tokenizer.decode([i]).isascii()])
        for name, parameter in model.talker.named_parameters():
            if parameter.dim() > 1 and "layers" not in name:
                parameter.mul_(15)  # wide enough logits that codes differ
        _only(model.talker.codec_head.weight, [*range(CODES)])
        speakers = {
            name: {
                "bos_token": len(tokenizer) + TEXT_CONTROL.index(name.lower()),
                "cond": torch.randn(1, SPEAKER_WIDTH),
                "ref_mel": torch.randn(1, 30, MEL),
            }
            for name in SPEAKERS
        }
        _spread_waveform(model.token2wav, speakers[SPEAKERS[0]])
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    torch.save(speakers, out / SPEAKER_FILE)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "preprocessor_config.json").write_text(json.dumps(preprocessor_config(), indent=2) + "\n")


def _only(head: Any, ids: list[int]) -> None:
    """Zero the other output rows: greedy answers then hold none of their ids."""
    import torch

    others = torch.ones(len(head), dtype=torch.bool)
    others[ids] = False
    head[others] = 0


def _spread_waveform(token2wav: Any, speaker: dict[str, Any]) -> None:
    """Widen the diffusion so that codes and speakers are heard, and scale the sound: neither silent nor clamped."""
    import torch

    for name, parameter in token2wav.code2wav_dit_model.named_parameters():
        if parameter.dim() > 1:
            parameter.mul_(4 if "spk_encoder" in name else 8)
    vocoder = token2wav.code2wav_bigvgan_model
    for name, parameter in vocoder.named_parameters():
        if parameter.dim() > 1 and not name.startswith("conv_post"):
            parameter.mul_(6)
    last = vocoder.conv_post.weight
    last.mul_(2.0**-10)  # far from the clamp, to measure
    codes = torch.randint(CODES, (1, 40))
    sound = token2wav(codes, conditioning=speaker["cond"], reference_mel=speaker["ref_mel"])
    # A power of two: sums that depend on the number of threads must not show in the file.
    last.mul_(2.0 ** round(math.log2(LOUDNESS / float(sound.square().mean().sqrt()))))
