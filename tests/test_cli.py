"""``omni-ray``: exit codes, JSON shapes, and that mistakes are answered before anything starts."""

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from omni_ray import __version__, doctor
from omni_ray.cli import _parser, main, parse_arguments
from omni_ray.errors import ConfigError
from omni_ray.registry import OMNI_PIPELINES
from omni_ray.serve.resolve import AppArgs, resolve

ROOT = Path(__file__).resolve().parents[1]
PIPELINES = sorted(OMNI_PIPELINES)
COMMANDS = ["list", "plan", "build", "checkpoint", "serve", "bench", "top", "dashboards", "doctor"]


@pytest.fixture(autouse=True)
def _no_cluster():
    """No command tested here may start or join a Ray cluster."""
    before = ray.is_initialized()
    yield
    assert ray.is_initialized() == before


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


class TestList:
    def test_text(self, capsys):
        code, out, _ = run(capsys, "list")
        assert code == 0
        assert "ramp           thinker -> talker -> code2wav\n" in out

    def test_json(self, capsys):
        code, out, _ = run(capsys, "list", "--json")
        rows = json.loads(out)
        assert code == 0
        assert [row["name"] for row in rows] == PIPELINES
        assert {frozenset(row) for row in rows} == {frozenset({"name", "stages", "outputs", "description"})}

    def test_installed_command(self):
        """The entry point in pyproject.toml, as a user types it."""
        command = Path(sys.executable).with_name("omni-ray")
        if not command.exists():
            pytest.skip("omni_ray is not installed as a package here")
        done = subprocess.run([command, "list"], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.startswith(PIPELINES[0])
        assert done.stderr == ""


class TestPlan:
    @pytest.mark.parametrize("name", PIPELINES)
    def test_json(self, capsys, name):
        code, out, _ = run(capsys, "plan", name, "--json")
        report = json.loads(out)
        assert code == 0
        assert set(report) == {
            "pipeline", "description", "model", "stages", "ingress", "edges", "requests", "total", "cluster",
        }  # fmt: skip
        assert {frozenset(row) for row in (*report["stages"], report["ingress"])} == {
            frozenset({
                "name", "deployment", "engine", "model", "output", "least_replicas", "replicas", "resources",
                "placement_group", "max_num_seqs",
            })
        }  # fmt: skip
        assert {frozenset(row) for row in report["edges"]} == {
            frozenset({"source", "target", "parts", "processor", "schema_version", "transport"})
        }
        assert all(set(row) == {"takes", "makes", "stages"} for row in report["requests"])
        assert report["total"]["CPU"] == pytest.approx(
            sum(row["resources"]["CPU"] * row["replicas"] for row in (*report["stages"], report["ingress"]))
        )

    @pytest.mark.parametrize("name", PIPELINES)
    def test_text_names_every_deployment_and_edge(self, capsys, name):
        code, out, _ = run(capsys, "plan", name)
        assert code == 0
        resolved = resolve(name, AppArgs())
        for stage in resolved.pipeline.stages:
            assert f"\n{stage.name}" in out
            for edge in stage.inputs:
                parts = f" ({' + '.join(edge.parts)})" if edge.parts else ""
                assert f"  {edge.source}{parts} -> {stage.name}: " in out
        assert "\ningress" in out
        assert "\nin all: " in out

    def test_ramp_word_for_word(self, capsys):
        """What a request takes, makes and runs through; transports where refs travel."""
        out = run(capsys, "plan", "ramp")[1]
        assert "  thinker -> talker: rows_of_thinker, schema 1, actor path, object refs\n" in out
        assert "  talker -> code2wav: frames_of_talker, schema 1, gRPC\n" in out
        assert "  request (messages) -> thinker: words_of_chat, schema 1, request\n" in out
        assert "  messages -> text: thinker\n" in out
        assert "  messages -> text + audio: thinker -> talker -> code2wav\n" in out
        assert "  speech_text -> audio: talker -> code2wav" in out

    def test_placement_group_and_total(self, capsys, tmp_path):
        path = tmp_path / "ramp.yaml"
        path.write_text("stages: {talker: {deployment: {num_replicas: 2, ray_actor_options: {num_gpus: 0.5}}}}\n")
        code, out, _ = run(capsys, "plan", "ramp", f"deploy_config={path}", "--json")
        report = json.loads(out)
        talker = next(row for row in report["stages"] if row["name"] == "talker")
        assert code == 0
        assert talker["placement_group"] == [{"CPU": 0.1, "GPU": 0.5}]
        assert report["total"] == {"CPU": 0.5, "GPU": 1.0}

    @pytest.mark.parametrize("command", ["plan", "serve", "top"])
    def test_no_cluster_at_the_address(self, capsys, command):
        """``ray.init`` tried a dead address for more than eight minutes, without a word."""
        code, _, err = run(capsys, command, "ramp", "--address", "127.0.0.1:1")
        assert code == 2
        assert "no Ray cluster can be joined at '127.0.0.1:1': [Errno 111] Connection refused" in err

    def test_arguments_behind_an_option(self, capsys):
        """argparse refused ``plan ramp --json model=x``: "unrecognized arguments: model=x"."""
        code, out, _ = run(capsys, "plan", "ramp", "--json", "model=x")
        assert (code, json.loads(out)["model"]) == (0, "x")

    @pytest.mark.parametrize(
        ("typed", "answer"),
        [
            ("rampp", f"- unknown pipeline 'rampp'; did you mean 'ramp'? known: {', '.join(PIPELINES)}\n"),
            ("zzz", f"- unknown pipeline 'zzz'; known: {', '.join(PIPELINES)}\n"),
        ],
    )
    def test_typo(self, capsys, typed, answer):
        code, out, err = run(capsys, "plan", typed)
        assert (code, out) == (2, "")
        assert err == f"omni-ray plan: 1 problem(s)\n{answer}"

    def test_typo_names_the_known_ones(self, capsys):
        code, _, err = run(capsys, "plan", "qwen3_typo")
        assert code == 2
        assert f"known: {', '.join(PIPELINES)}" in err

    def test_broken_deploy_config(self, capsys, tmp_path):
        path = tmp_path / "ramp.yaml"
        path.write_text("stages:\n  tolker: {}\n")
        code, _, err = run(capsys, "plan", "ramp", f"deploy_config={path}")
        assert code == 2
        assert f"{path}: stages.tolker: unknown stage 'tolker'; did you mean 'talker'?" in err

    def test_inline_deploy_config(self, capsys):
        argument = 'deploy_config={"stages": {"talker": {"deployment": {"num_replicas": 3}}}}'
        code, out, _ = run(capsys, "plan", "ramp", argument, "--json")
        assert code == 0
        assert [row["replicas"] for row in json.loads(out)["stages"]] == [1, 3, 1]


class TestBuild:
    @pytest.mark.parametrize("name", PIPELINES)
    def test_is_a_serve_config_without_deployments(self, capsys, name):
        """C67; and a ``deployments:`` block would replace derived options silently (it can drop a GPU)."""
        code, out, _ = run(capsys, "build", name)
        config = yaml.safe_load(out)
        ServeDeploySchema.model_validate(config)
        assert code == 0
        assert "deployments" not in out
        (application,) = config["applications"]
        assert application["import_path"] == f"graphs:{name}"
        assert application["args"]["deploy_config"]["pipeline"] == name
        AppArgs.model_validate(application["args"])

    def test_round_trip(self, capsys, tmp_path):
        """What the built file deploys is exactly what was asked for, on a node that has no file."""
        path = tmp_path / "ramp.yaml"
        path.write_text("model: /m\nstages: {talker: {deployment: {num_replicas: 2}, engine: {max_num_seqs: 3}}}\n")
        given = {"deploy_config": str(path), "served_model_name": "speak"}
        out = run(capsys, "build", "ramp", *(f"{k}={v}" for k, v in given.items()))[1]
        path.unlink()
        built = resolve("ramp", AppArgs.model_validate(yaml.safe_load(out)["applications"][0]["args"]))
        path.write_text("model: /m\nstages: {talker: {deployment: {num_replicas: 2}, engine: {max_num_seqs: 3}}}\n")
        asked = resolve("ramp", AppArgs.model_validate(given))
        assert (built.stages, built.ingress) == (asked.stages, asked.ingress)
        assert built.ingress.model_name == "speak"

    def test_output_file(self, capsys, tmp_path):
        target = tmp_path / "serve.yaml"
        code, out, err = run(capsys, "build", "ramp", "-o", str(target))
        assert (code, out) == (0, "")
        assert f"serve deploy {target}" in err
        ServeDeploySchema.model_validate(yaml.safe_load(target.read_text()))

    def test_output_that_cannot_be_written(self, capsys, tmp_path):
        code, _, err = run(capsys, "build", "ramp", "-o", str(tmp_path / "no" / "x.yaml"))
        assert code == 2
        assert f"{tmp_path / 'no' / 'x.yaml'}: cannot be written: No such file or directory" in err

    def test_a_wrong_config_writes_nothing(self, capsys, tmp_path):
        target = tmp_path / "serve.yaml"
        assert run(capsys, "build", "ramp", "modle=x", "-o", str(target))[0] == 2
        assert not target.exists()


class TestServe:
    """Only what happens before a cluster starts."""

    def test_mistakes_are_found_before_ray_starts(self, capsys):
        code, _, err = run(capsys, "serve", "rampp")
        assert code == 2
        assert "did you mean 'ramp'?" in err
        code, _, err = run(capsys, "serve", "ramp", "deploy_config=/absent.yaml")
        assert code == 2
        assert "/absent.yaml: cannot be read on node" in err

    def test_a_port_that_is_taken(self, capsys, monkeypatch):
        """Two servers of one user once shared it, and their requests; with HAProxy mode it was a traceback."""
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setenv("PYTHONPATH", "")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            code, _, err = run(capsys, "serve", "ramp", "--port", str(port))
        assert code == 2
        assert f"--port {port}: nothing can listen there: [Errno 98] Address already in use" in err

    def test_haproxy_mode_is_not_for_a_cluster_that_runs(self, capsys):
        code, _, err = run(capsys, "serve", "ramp", "--haproxy", "--address", "127.0.0.1:1")
        assert code == 2
        assert "start every node of it with RAY_SERVE_ENABLE_HA_PROXY=1 RAY_SERVE_THROUGHPUT_OPTIMIZED=1" in err


class TestCheckpoint:
    """Only what is refused: tests of the pipelines make theirs."""

    def test_what_is_there_is_not_touched(self, capsys, tmp_path):
        """A file in the directory's place was a traceback."""
        file = tmp_path / "file"
        file.write_text("mine")
        for out in (file, tmp_path):
            code, _, err = run(capsys, "checkpoint", "qwen3_omni", "--tiny", str(out))
            assert code == 2
            assert err.endswith(f"- {out} exists and is no empty directory\n")
        assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]

    def test_a_kind_that_a_pipeline_does_not_make(self, capsys, tmp_path):
        code, _, err = run(capsys, "checkpoint", "ramp", "--dummy", str(tmp_path / "new"))
        assert code == 2
        assert "ramp makes no dummy checkpoint; known: none" in err


class TestDoctor:
    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch):
        """No child process per package: that takes half a minute where torch and vLLM are installed."""
        monkeypatch.setattr(doctor, "_import_failure", lambda modules: None)

    def test_json(self, capsys):
        code, out, _ = run(capsys, "doctor", "--json")
        rows = json.loads(out)
        assert code == (1 if any(row["status"] == "bad" for row in rows) else 0)
        assert all(set(row) == {"status", "subject", "message"} for row in rows)
        assert {row["status"] for row in rows} <= {"ok", "note", "bad"}
        assert {"python", "ray", "soundfile", "open files", "port 8000"} <= {row["subject"] for row in rows}

    def test_text(self, capsys):
        _, out, _ = run(capsys, "doctor")
        assert all(line.split()[0] in ("ok", "note", "bad") for line in out.splitlines())

    def test_a_package_that_does_not_import_is_bad(self, capsys, monkeypatch):
        """C66: a mismatch gives one clear line and exit code 1."""
        error = "ImportError: libfoo.so: cannot open"
        monkeypatch.setattr(doctor, "_import_failure", lambda modules: error if modules == "soxr" else None)
        code, out, _ = run(capsys, "doctor")
        assert code == 1
        (line,) = [line for line in out.splitlines() if line.split()[1] == "soxr"]
        assert line.startswith("bad ")
        assert line.endswith(f"does not import: {error}")

    def test_missing_optional_package_is_a_note(self, monkeypatch):
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
        assert doctor._package("vllm") == doctor.Finding("note", "vllm", "not installed (optional)")
        assert doctor._package("ray") == doctor.Finding("bad", "ray", "not installed")


def test_import_failure_is_the_last_line_of_the_error():
    assert doctor._import_failure("json") is None
    assert doctor._import_failure("no_such_module_here") == "ModuleNotFoundError: No module named 'no_such_module_here'"


class TestArguments:
    @pytest.mark.parametrize(
        ("words", "problems"),
        [
            (
                ["ramp.yaml"],
                ["argument 'ramp.yaml': write key=value, for example deploy_config=deploy_configs/ramp.yaml"],
            ),
            (["model=a", "model=b"], ["argument 'model' is given twice"]),
            (
                ["x", "model=a", "model=a"],
                [
                    "argument 'x': write key=value, for example deploy_config=deploy_configs/ramp.yaml",
                    "argument 'model' is given twice",
                ],
            ),
        ],
    )
    def test_mistakes(self, words, problems):
        with pytest.raises(ConfigError) as caught:
            parse_arguments(words)
        assert list(caught.value.problems) == problems

    def test_values_may_hold_equals_signs(self):
        assert parse_arguments(["model=/a=b", "x="]) == {"model": "/a=b", "x": ""}

    @pytest.mark.parametrize(
        ("word", "answer"),
        [
            ("modle=x", "unknown argument 'modle'; did you mean 'model'?"),
            ("model=", "argument 'model': is empty; give a value or leave it out"),
            ("=x", "unknown argument ''; known: deploy_config, model, served_model_name"),
        ],
    )
    def test_answers(self, capsys, word, answer):
        code, _, err = run(capsys, "plan", "ramp", word)
        assert code == 2
        assert answer in err

    @pytest.mark.parametrize("argv", [["plan", "ramp", "--jsn"], ["list", "ramp"], ["nothing"], [], ["plan"]])
    def test_wrong_usage_is_2(self, capsys, argv):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
        assert "usage: omni-ray" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], *([command] for command in COMMANDS)])
def test_every_help_works(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        main([*argv, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: omni-ray")
    if not argv:
        assert "exit codes: 0 done" in out
        assert all(f"\n    {command}" in out for command in COMMANDS)


def test_every_command_is_tested_here():
    (commands,) = [a for a in _parser()._actions if a.dest == "command"]
    assert set(COMMANDS) == set(commands.choices)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


def test_every_option_says_what_it_is_and_its_true_default():
    checked = 0
    for parser in parsers(_parser()):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction | argparse._HelpAction | argparse._VersionAction):
                continue
            said = (action.help or "") % {"default": action.default}
            assert said, f"{parser.prog} {action.dest}"
            if action.nargs != 0 and action.default not in (None, [], "{}"):
                assert f"(default: {action.default})" in said, f"{parser.prog} {action.dest}: {said}"
                checked += 1
    assert checked > 40


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"omni-ray {__version__}\n"
