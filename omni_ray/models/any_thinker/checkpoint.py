"""Makes a tiny random text model: a Llama of transformers with a byte tokenizer and a chat template."""

from pathlib import Path
from typing import Any, Final

TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(out: Path, seed: int = 0) -> None:
    """Write a checkpoint of some 0.1 M parameters; equal seeds give equal files.

    Answers are ASCII text without special tokens, so they never end by themselves.

    Args:
        out: made if need be; files of the same names are replaced.
        seed: of the weights.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from omni_ray.engine.transformers_build import BUILDING

    tokenizer = byte_tokenizer(TEMPLATE)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32 numbers each, the fewest that vLLM computes on CPUs
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with BUILDING, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        silent = [i for i in range(len(tokenizer)) if not tokenizer.decode([i], skip_special_tokens=True).isascii()]
        model.lm_head.weight[[*silent, *tokenizer.all_special_ids]] = 0
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def byte_tokenizer(template: str, special: tuple[str, ...] = ()) -> Any:
    """A tokenizer with one token for each byte, then the special ones: turns' marks, and ``special``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", *special],
    )
    made.chat_template = template
    return made
