"""Every test that a page of promises names exists: a promise whose test is gone is none."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("page", ["PROMISES.md"])
def test_named_tests_exist(page: str) -> None:
    named = NAMED.findall((ROOT / page).read_text())
    assert len(named) > 30
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in defined, f"{page} names {file}::{name}, which does not exist"


def test_every_promise_names_its_test() -> None:
    rows = [line for line in (ROOT / "PROMISES.md").read_text().splitlines() if line.startswith("|")]
    promises = [row for row in rows if not row.startswith(("|---", "| promise"))]
    assert len(promises) > 25
    for row in promises:
        cells = row.strip("|").split("|")
        assert len(cells) == 3, row
        assert "guaranteed" in cells[1] or "best effort" in cells[1], row
        assert NAMED.search(cells[2]), row
