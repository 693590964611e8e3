"""Captures that nobody waits for: one after another, until they are told to stop or the process ends."""

import logging
import subprocess
import sys
import threading
import time

import pytest
import torch

from omni_ray.engine.capture import Captures

LEAVES = """
import torch
from omni_ray.engine.capture import Captures

torch.set_num_threads(1)
a, begun = torch.rand(300, 300), []


def capture():
    begun.append(None)
    for _ in range(50):
        torch.mm(a, a)


captures = Captures()
for number in range(3):
    captures.add(str(number), capture)
while not begun:
    pass
"""


def test_they_come_one_after_another_and_one_that_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    captures, seen = Captures(), []

    def capture(number: int) -> None:
        time.sleep(0.01)
        seen.append((number, threading.get_ident(), torch.is_inference_mode_enabled()))
        if number == 1:
            raise RuntimeError("no memory")

    for number in range(3):
        captures.add(f"graph {number}", lambda number=number: capture(number))
    captures.wait()
    assert [number for number, _, _ in seen] == [0, 1, 2]
    assert len({thread for _, thread, _ in seen} - {threading.get_ident()}) == 1
    assert all(inference for _, _, inference in seen)
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.ERROR, "not captured: graph 1")]
    captures.stop()


def test_stop_waits_for_the_one_that_runs_and_begins_no_other() -> None:
    captures, done = Captures(), []

    def capture() -> None:
        time.sleep(0.2)
        done.append("first")

    captures.add("first", capture)
    captures.add("second", lambda: done.append("second"))
    captures.stop()
    assert done == ["first"]
    with pytest.raises(RuntimeError):
        captures.add("third", lambda: None)


def test_a_process_may_end_while_they_run() -> None:
    """A daemon thread inside PyTorch would abort it: ``terminate called without an active exception``."""
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
