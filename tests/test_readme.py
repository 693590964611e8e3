"""README.md tells the truth: its code blocks run, its paths exist, its lists are complete."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from omni_ray.registry import pipeline_names
from tests.conftest import Serving
from tests.serve.test_voice_chat import CONFIG

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = [(m[1].strip(), m[2]) for m in re.finditer(r"```(.*?)\n(.*?)```", TEXT, re.DOTALL)]
SERVER = "http://127.0.0.1:8000"


def blocks(kind: str) -> list[str]:
    return [body for name, body in BLOCKS if name == kind]


@pytest.mark.weights
def test_client_blocks_run_against_voice_chat(serving: Serving, tmp_path: Path) -> None:
    """curl and openai-python exactly as printed, but for the port; a player that is not installed is left out."""
    app = serving("voice_chat", CONFIG)
    ran = []
    for body in blocks("bash") + blocks("python"):
        if SERVER not in body or body.startswith("make") or "/v1/images" in body:
            continue  # tests/serve/test_diffusion.py runs what asks for pictures
        body = re.sub(r"\\\n\s*\| ffplay.*", "> played.pcm", body.replace(SERVER, app.url))
        body = body.replace("omni-ray ", f"{sys.executable} -m omni_ray.cli ")
        command = [sys.executable, "-c", body] if "import base64" in body else ["bash", "-eo", "pipefail", "-c", body]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{body}\n{done.stdout}\n{done.stderr}"
        ran.append(done.stdout)
    assert len(ran) == 4
    assert (tmp_path / "played.pcm").stat().st_size > 48000
    assert (tmp_path / "answer.pcm").stat().st_size > 48000
    assert any("Paris" in out for out in ran)
    assert sum(out.count("errors: 0 of 2") for out in ran) == 3
    assert json.loads((tmp_path / "speech.json").read_text())["figures"]["audio_duration_s"]["count"] == 2
    assert "<svg" in (tmp_path / "speech.html").read_text()
    assert any('"text":"What is the capital of France?"' in out.replace('": "', '":"') for out in ran)


def test_command_blocks_run(tmp_path: Path) -> None:
    """The omni-ray commands of the cluster section."""
    (body,) = [b for b in blocks("bash") if "omni-ray plan" in b]
    commands = [line.split("#")[0].split() for line in body.splitlines() if line.strip()]
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", "omni_ray.cli", *command[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("bash")), re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_tree_matches_the_repository() -> None:
    """Every path of the tree exists, and every module and folder of omni_ray is in it."""
    (tree,) = blocks("text")
    named = set()
    parent = ""
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            parent = name if name == "omni_ray/" else ""
        path = ROOT / parent / name if line.startswith(" ") else ROOT / name
        assert path.exists(), f"README names {path.relative_to(ROOT)}, which is not there"
        named.add(str(path.relative_to(ROOT)).rstrip("/"))
    for path in (ROOT / "omni_ray").iterdir():
        if path.name not in ("__init__.py", "__pycache__", "py.typed", "models"):
            assert str(path.relative_to(ROOT)) in named, f"{path.name} is missing from README's tree"
    for path in (ROOT / "omni_ray" / "models").iterdir():
        if path.is_dir() and path.name != "__pycache__":
            assert f"omni_ray/models/{path.name}" in named


def test_named_paths_and_pipelines_exist() -> None:
    for path in re.findall(r"`((?:omni_ray|benchmarks|deploy_configs)/[\w./]*)`", TEXT):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"graphs:(\w+)", TEXT):
        assert name in pipeline_names()
