"""Makes a tiny random checkpoint in MOSS-TTS-Nano's layout: weights, and the Python code that computes them.

No published checkpoint is at hand, so the code is our own (``tiny/``): a small recurrent model with upstream's
``inference_stream`` interface, its two kinds of events, its stereo sound at 48 kHz, its global random generators and
its codec whose decoding state lies on the module.
"""

import shutil
from pathlib import Path
from typing import Final

_CODE: Final = Path(__file__).with_name("tiny")
CODEC: Final = "audio_tokenizer"
"""The codec's directory inside the checkpoint."""


def make_tiny(out: Path, seed: int = 0) -> None:
    """Write the checkpoint; equal seeds give equal files.

    Args:
        out: made if need be; files of the same names are replaced.
        seed: of the weights.
    """
    import torch

    from omni_ray.models.moss_tts_nano.tiny.modeling_moss_audio_tokenizer import (
        MossAudioTokenizerConfig,
        MossAudioTokenizerModel,
    )
    from omni_ray.models.moss_tts_nano.tiny.modeling_moss_tts_nano import MossTTSNanoConfig, MossTTSNanoForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        talker, codec = MossTTSNanoForCausalLM(MossTTSNanoConfig()), MossAudioTokenizerModel(MossAudioTokenizerConfig())
    talker.config.auto_map = {
        "AutoConfig": "modeling_moss_tts_nano.MossTTSNanoConfig",
        "AutoModelForCausalLM": "modeling_moss_tts_nano.MossTTSNanoForCausalLM",
    }
    codec.config.auto_map = {
        "AutoConfig": "modeling_moss_audio_tokenizer.MossAudioTokenizerConfig",
        "AutoModel": "modeling_moss_audio_tokenizer.MossAudioTokenizerModel",
    }
    for model, place, code in (
        (talker, out, "modeling_moss_tts_nano.py"),
        (codec, out / CODEC, "modeling_moss_audio_tokenizer.py"),
    ):
        model.save_pretrained(place)
        shutil.copyfile(_CODE / code, place / code)
