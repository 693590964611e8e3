"""Writes random weights of Qwen3-Omni's codec beside a config, for vLLM-Omni's third stage.

    python benchmarks/h200/codec_weights.py MODEL_DIR

vLLM-Omni 0.26 captures the codec's CUDA graphs at the end of ``load_weights``, which ``load_format: dummy`` never
calls: without this file its codec would run without them. The values do not matter for speed.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    directory = parser.parse_args().model_dir
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    module = Qwen3OmniMoeCode2Wav._from_config(AutoConfig.from_pretrained(directory).code2wav_config)
    tensors = {
        f"code2wav.{name}": tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in module.state_dict().items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
