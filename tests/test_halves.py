"""``make test`` runs every test in one of two halves, and only the second may start Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HALVES = ["-n 2 --dist worksteal -m not alone", "-m alone"]
"""One asks for a mark and the other for its absence, and nothing else chooses: no test is in neither."""


@pytest.mark.parametrize("failing", [*HALVES, "none"])
def test_a_half_that_fails_stops_nothing_and_is_said_last(tmp_path: Path, failing: str) -> None:
    """The recipe itself, with a command in python's place that prints what pytest would."""
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/bash
        echo "half: ${{*:3}}"
        [ "${{*:3}}" = "{failing}" ] || {{ echo "=== 3 passed in 1.00s ==="; exit 0; }}
        echo "FAILED tests/test_x.py::test_x"; echo "=== 1 failed, 2 passed in 61.00s (0:01:01) ==="; exit 1
        """
    )
    python.chmod(0o755)
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "WORKERS"))}
    command = ["make", "--old-file=weights", f"BIN={tmp_path}", "test"]
    done = subprocess.run(command, cwd=ROOT, env=outer, capture_output=True, text=True, timeout=60)
    assert [line[6:] for line in done.stdout.splitlines() if line.startswith("half: ")] == HALVES
    assert (done.returncode == 0) == (failing == "none")
    first_again = done.stdout.split("those that start no Ray:\n")[1]
    assert first_again.startswith("FAILED tests/test_x.py::test_x\n=== 1 failed" if failing == HALVES[0] else "=== 3 p")


def test_ray_cannot_start_beside_other_tests() -> None:
    beside = {**os.environ, "PYTEST_XDIST_WORKER": "gw0"}
    command = [sys.executable, "-c", "import tests.conftest, ray; ray.init(address='local')"]
    done = subprocess.run(command, cwd=ROOT, env=beside, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "only a test with the mark 'alone' may start Ray" in done.stderr
