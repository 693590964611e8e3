"""The arguments of ``omni-ray bench`` and what it prints. Imports what measures only when it runs."""

import argparse
import asyncio
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_ray.errors import ConfigError

if TYPE_CHECKING:
    from omni_ray.bench.answer import Answer
    from omni_ray.bench.report import Measured
    from omni_ray.bench.workload import Workload

KINDS = {
    "chat": "chat completions, text and sound out",
    "speech": "speech from text",
    "transcription": "text from sound",
}


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Sub-commands of ``omni-ray bench``."""
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for kind, text in KINDS.items():
        add = kinds.add_parser(kind, help=text, description=f"Measure one running server: {text}.")
        add.add_argument("--url", required=True, help="the API's base, for example http://127.0.0.1:8000/v1")
        add.add_argument("--name", default="server", help="what tables call it (default: %(default)s)")
        _workload(add, kind)
        add.set_defaults(run=_one, kind=kind)
    add = kinds.add_parser(
        "compare",
        help="start server A, measure, stop it; then B; one table",
        description="Start each server by its command, wait for its health, run the workload, stop it with everything "
        "it started, then the next. Ratios are B / A.",
    )
    compared = add.add_subparsers(dest="kind", required=True, metavar="WHAT")
    for kind, text in KINDS.items():
        add = compared.add_parser(kind, help=text, description=f"Compare two servers: {text}.")
        for side in "ab":
            add.add_argument(f"--{side}", required=True, metavar="COMMAND", help=f"starts server {side.upper()}")
            add.add_argument(f"--{side}-url", required=True, metavar="URL", help="its API's base, ending in /v1")
            add.add_argument(
                f"--{side}-name",
                default=side.upper(),
                metavar="NAME",
                help="what tables call it (default: %(default)s)",
            )
            add.add_argument(f"--{side}-model", metavar="ID", help="its model id (default: that of --model)")
            add.add_argument(
                f"--{side}-health",
                default="/health",
                metavar="PATH",
                help="answers 200 when it is up (default: %(default)s)",
            )
        add.add_argument(
            "--start-timeout",
            type=float,
            default=1200,
            metavar="S",
            help="seconds in which each is up (default: %(default)s)",
        )
        _workload(add, kind)
        add.set_defaults(run=_compare, kind=kind)
    add = kinds.add_parser("definitions", help="what each figure means", description="What each figure means.")
    add.set_defaults(run=_definitions)


def _workload(add: argparse.ArgumentParser, kind: str) -> None:
    ask = add.add_argument_group("workload")
    ask.add_argument("--requests", type=int, default=16, metavar="N", help="measured requests (default: %(default)s)")
    ask.add_argument("--warmup", type=int, default=2, metavar="N", help="requests before them (default: %(default)s)")
    ask.add_argument("--concurrency", type=int, metavar="N", help="closed loop of N clients (default: 1)")
    ask.add_argument("--rate", type=float, metavar="R", help="instead: Poisson arrivals, R per second")
    ask.add_argument("--seed", type=int, default=0, metavar="N", help="of texts, clips and arrivals (default: 0)")
    ask.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="further fields of every request (default: none)"
    )
    if kind != "transcription":
        ask.add_argument("--words", type=int, default=100, metavar="N", help="words in (default: %(default)s)")
        ask.add_argument("--max-tokens", type=int, metavar="N", help="limit of the answer (default: the server's)")
        ask.add_argument("--voice", default="alloy", metavar="NAME", help='"" sends none (default: %(default)s)')
    if kind == "chat":
        ask.add_argument("--text-only", action="store_true", help='ask for text alone: modalities ["text"]')
    if kind != "speech":
        ask.add_argument(
            "--audio", metavar="FILE", help="a clip to send (default: none, or what --audio-seconds makes)"
        )
        ask.add_argument(
            "--audio-seconds", type=float, metavar="S", help="seconds of the clip; without --audio one is made"
        )
    server = add.add_argument_group("server and output")
    server.add_argument("--model", metavar="ID", help="model id (default: the first that the server lists)")
    server.add_argument(
        "--api-key-env", metavar="VAR", help="environment variable that holds the API key (default: no key)"
    )
    server.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="seconds of silence that end a request (default: 600)"
    )
    server.add_argument(
        "--continuity-threshold",
        type=float,
        default=0.1,
        metavar="S",
        help="seconds of underrun that pass (default: 0.1)",
    )
    server.add_argument("--output", metavar="FILE", help="write everything as JSON")
    server.add_argument("--plot", metavar="FILE", help="write a self-contained HTML page")
    server.add_argument("--json", action="store_true", help="print JSON instead of the table")


def _definitions(args: argparse.Namespace) -> int:
    from omni_ray.bench.answer import ERROR_KINDS
    from omni_ray.bench.figures import definitions

    print(definitions())
    print("\nerrors, by kind:")
    for kind, meaning in ERROR_KINDS.items():
        print(f"  {kind:<14}  {meaning}")
    return 0


def _one(args: argparse.Namespace) -> int:
    from omni_ray.bench.report import table

    measured = _measure(args, _read_workload(args), args.name, args.url, args.model)
    return _show(args, [measured], table(measured))


def _compare(args: argparse.Namespace) -> int:
    from urllib.parse import urljoin

    from omni_ray.bench.report import comparison
    from omni_ray.bench.server import ServerFailedError, running

    workload = _read_workload(args)
    given = vars(args)
    servers = []
    for side in "ab":
        command, url, name = given[side], given[f"{side}_url"], given[f"{side}_name"]
        model = given[f"{side}_model"] or args.model
        _say(f"{name}: starting {command}")
        try:
            with running(command, urljoin(url, given[f"{side}_health"]), args.start_timeout, _say) as ready_s:
                _say(f"{name}: healthy after {ready_s:.1f} s")
                servers.append(_measure(args, workload, name, url, model, command, ready_s))
        except ServerFailedError as error:
            print(f"omni-ray bench: {name}: {error}", file=sys.stderr)
            return 1
    return _show(args, servers, comparison(servers))


def _measure(
    args: argparse.Namespace,
    workload: "Workload",
    name: str,
    url: str,
    model: str | None,
    command: str | None = None,
    ready_s: float | None = None,
) -> "Measured":
    from omni_ray.bench.load import Target, api_key_from, run
    from omni_ray.bench.report import Measured

    target = Target(url, model, api_key_from(args.api_key_env), args.timeout)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with ProgressLine(name, workload.warmup + workload.requests) as progress:
        outcome = asyncio.run(run(workload, target, progress.one_more))
    return Measured(name, url, workload, outcome, started_at, args.continuity_threshold, command, ready_s)


def _show(args: argparse.Namespace, servers: "list[Measured]", table: str) -> int:
    """Prints and writes; 1 if any counted request failed."""
    from omni_ray.bench.plot import page

    result: Any = servers[0].as_json() if len(servers) == 1 else [server.as_json() for server in servers]
    print(json.dumps(result, indent=2) if args.json else table)
    if args.output:
        _write(args.output, json.dumps(result, indent=2) + "\n")
    if args.plot:
        _write(args.plot, page(servers, table))
    return 1 if any(answer.error for server in servers for answer in server.run.answers) else 0


def _read_workload(args: argparse.Namespace) -> "Workload":
    from pydantic import ValidationError

    from omni_ray.bench.workload import Workload

    try:
        extra_body = json.loads(args.extra_body)
    except ValueError as error:
        raise ConfigError([f"--extra-body is not JSON: {error}"]) from error
    given = {name: value for name, value in vars(args).items() if name in Workload.model_fields}
    given["extra_body"] = extra_body
    given["voice"] = given.get("voice") or None
    if args.concurrency is None and args.rate is None:
        given["concurrency"] = 1
    try:
        return Workload(**given)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}".removeprefix(": ") for e in error.errors()]
        raise ConfigError(problems) from error


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be written: {error.strerror}"]) from error
    _say(f"wrote {path}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class ProgressLine:
    """A bar on standard error where that is a terminal; nothing elsewhere."""

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._done = self._failed = 0
        self._audio_s = 0.0
        self._started = time.monotonic()
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> "ProgressLine":
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print(file=sys.stderr)

    def one_more(self, answer: "Answer") -> None:
        """A request ended."""
        self._done += 1
        self._failed += answer.error is not None
        self._audio_s += answer.playback.audio_s
        self._draw()

    def _draw(self) -> None:
        if not self._shown:
            return
        filled = 24 * self._done // self._total
        bar = "#" * filled + "." * (24 - filled)
        speed = self._audio_s / max(time.monotonic() - self._started, 1e-9)
        said = f"{self._done}/{self._total}, {self._failed} failed, {speed:.1f} audio-s/s"
        print(f"\r{self._name} [{bar}] {said}\033[K", end="", file=sys.stderr, flush=True)
