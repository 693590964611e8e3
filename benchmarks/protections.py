"""Take every protection away, one by one, and see which test notices.

    python benchmarks/protections.py                       # all: half an hour; writes protections.md
    python benchmarks/protections.py --only "no cluster"   # those whose test starts no Ray
    python benchmarks/protections.py --only retry          # those with the word in their name

``removals_*.py`` list them. Each is taken out of a temporary copy of the tree, where the test that holds it is run, and
must fail. First all of these tests are run in the copy as it is, and must pass. Rows of what was not run are kept.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from removal import Removal
from removals_hostile import HOSTILE
from removals_identity import CANCELLATION, IDENTITY, REPAIR
from removals_load import HEALTH, LOAD

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "protections.md"
LIMIT_S = {"cluster": 200, "no cluster": 60}
CHECK_LIMIT_S = 300
REMOVALS = (*IDENTITY, *CANCELLATION, *REPAIR, *LOAD, *HEALTH, *HOSTILE)
HEAD = """# What holds each protection

`python benchmarks/protections.py` takes each protection out of a copy of the tree, runs one test there, and wants it to
fail; with nothing taken out, all these tests passed. "Seen" is how the test failed. One removal per row, so nothing
is said of two at once. `removals_*.py` have the exact edits. Protections of the list without a row were not tried yet.

| protection | taken out of | test that failed | seen |
|---|---|---|---|
"""
UNNOTICED = "**not noticed**"


def copied(into: Path) -> None:
    """The files that git knows, or would, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


@contextmanager
def without(removal: Removal, tree: Path) -> Iterator[None]:
    """``tree`` less the protection, while the body runs."""
    path = tree / removal.file
    whole = path.read_text()
    if whole.count(removal.old) != 1:
        raise SystemExit(f"{removal.name}: its text stands {whole.count(removal.old)} times in {removal.file}")
    path.write_text(whole.replace(removal.old, removal.new))
    try:
        yield
    finally:
        path.write_text(whole)


def tested(tree: Path, tests: Sequence[str], limit_s: int) -> tuple[int, str]:
    """Exit code and output of pytest; a test that takes longer than ``limit_s`` fails."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={limit_s}", *tests]
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, cwd=tree, env=environment, stdout=pipe, stderr=both, text=True)
    return done.returncode, done.stdout


def seen(output: str) -> str:
    """The first line that says what went wrong, short enough for a table."""
    if "from pytest-timeout" in output:
        return "it hung"
    said = [line[1:].strip() for line in output.splitlines() if re.match(r"E\s+\S", line)]
    first = re.sub(r"0x[0-9a-f]+|[^ -~]+", "...", (said or ["?"])[0])  # addresses, and bytes of sound
    return first[:110].replace("|", "\\|").replace("`", "'")


def tried(removal: Removal, tree: Path) -> str:
    """The row of one removal."""
    began = time.monotonic()
    with without(removal, tree):
        for _ in range(3):  # a fixture that fails, as a cluster may on a busy machine, says nothing
            code, output = tested(tree, ["-x", removal.test], LIMIT_S[removal.group])
            if code == 0 or re.search(r"^FAILED ", output, re.MULTILINE):
                break
        else:
            raise SystemExit(f"{removal.name}: its test could not be run\n{output[-2000:]}")
    result = UNNOTICED if code == 0 else seen(output)
    print(f"{removal.name}: {result} ({time.monotonic() - began:.0f} s)", flush=True)
    return f"| {removal.name} | `{removal.file}` | `{removal.test}` | {result} |"


def known() -> dict[str, str]:
    """The page's rows, by protection."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}


def write(name: str, row: str) -> None:
    rows = {**known(), name: row}
    ordered = [rows[removal.name] for removal in REMOVALS if removal.name in rows]
    noticed = sum(UNNOTICED not in row for row in ordered)
    PAGE.write_text(HEAD + "\n".join(ordered) + f"\n\n{noticed} of {len(ordered)} were noticed.\n")


def must_pass(tree: Path, tests: Sequence[str]) -> None:
    """All tests pass in the tree as it is; what fails once, on a busy machine, is tried once more."""
    code, output = tested(tree, tests, CHECK_LIMIT_S)
    if code == 1:
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        print(f"once more: {failed}", flush=True)
        code, output = tested(tree, failed, CHECK_LIMIT_S)
    if code:
        raise SystemExit(f"the tests must pass before anything is taken out\n{output}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help='a word of their names, "cluster" or "no cluster"')
    parser.add_argument("--missing", action="store_true", help="only those that have no row yet")
    given = parser.parse_args()
    rows, unnoticed = known(), 0
    chosen = [r for r in REMOVALS if given.only == r.group or (given.only in r.name and given.only not in LIMIT_S)]
    chosen = [r for r in chosen if not given.missing or r.name not in rows]
    with tempfile.TemporaryDirectory(prefix="protections") as folder:
        tree = Path(folder)
        copied(tree)
        must_pass(tree, sorted({removal.test for removal in chosen}))
        for removal in chosen:
            row = tried(removal, tree)
            unnoticed += UNNOTICED in row
            write(removal.name, row)
    return unnoticed


if __name__ == "__main__":
    sys.exit(main())
