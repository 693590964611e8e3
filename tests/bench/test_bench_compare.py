"""``omni-ray bench compare``: two servers one after the other, stopped with all they started, one table."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omni_ray.bench import server
from omni_ray.bench.server import ServerFailedError, running
from omni_ray.cli import main
from omni_ray.errors import ConfigError
from omni_ray.serve.ports import free_port

FAKE = f"{sys.executable} {Path(__file__).with_name('fake_vllm_omni.py')}"


def lines_of_ps() -> list[str]:
    return subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()


def test_two_servers_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a second of sound each from A, 0.9 s from B; both are stopped with all they started.

    What is measured of a real server, ``test_bench_ramp`` checks; starting one here would cost half a minute.
    """
    a, b = free_port(), free_port()
    out = tmp_path / "compare.json"
    code = main([
        "bench", "compare", "chat", "--words", "4", "--requests", "3", "--warmup", "1", "--output", str(out),
        "--plot", str(tmp_path / "compare.html"),
        "--a", f"{FAKE} {a} 5 0.1 0.05", "--a-url", f"http://127.0.0.1:{a}/v1", "--a-name", "small",
        "--b", f"{FAKE} {b} 9 0.1 0.05", "--b-url", f"http://127.0.0.1:{b}/v1", "--b-name", "large",
    ])  # fmt: skip
    shown = capsys.readouterr()
    assert code == 0, shown
    assert "large / small" in shown.out
    small, large = json.loads(out.read_text())
    assert small["figures"]["audio_duration_s"]["p50"] == pytest.approx(0.5)
    assert large["figures"]["audio_duration_s"]["p50"] == pytest.approx(0.9)
    assert small["workload"] == large["workload"]
    row = next(line for line in shown.out.splitlines() if line.startswith("audio s p50"))
    assert row.split()[-3:] == ["0.500", "0.900", "1.80"]
    assert "small, large" in (tmp_path / "compare.html").read_text()
    assert not [line for line in lines_of_ps() if f"{FAKE} {a}" in line or f"{FAKE} {b}" in line]


def test_a_server_that_will_not_stop_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores SIGTERM and has a child in another session."""
    monkeypatch.setattr(server, "STOP_S", 1.0)
    port, said = free_port(), []
    before = time.monotonic()
    with running(f"{FAKE} {port} 1 1 1 --stubborn", f"http://127.0.0.1:{port}/health", 30, said.append):
        assert [line for line in lines_of_ps() if line.endswith("sleep 1234")]
    assert said == ["the server did not end within 1 s of SIGTERM; it is killed"]
    assert time.monotonic() - before < 100
    assert not [line for line in lines_of_ps() if line.endswith("sleep 1234")]


def test_a_server_that_does_not_start() -> None:
    port = free_port()
    health = f"http://127.0.0.1:{port}/health"
    broken = f"{sys.executable} -c \"import sys; print('no weights here'); sys.exit(3)\""
    for command, error, said in [
        (broken, ServerFailedError, "ended with 3\nno weights here"),
        ("sleep 60", ServerFailedError, "not healthy within 1 s"),
        ("no-such-program", ConfigError, "cannot be run"),
    ]:
        with pytest.raises(error, match=said), running(command, health, 20 if command == broken else 1, print):
            pytest.fail("it never was healthy")
