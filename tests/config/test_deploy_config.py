"""Deploy configs: what an operator mistypes is named by file, key and nearest known name."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_ray.config.deploy import (
    DeployConfig,
    StageDeployConfig,
    parse_deploy_config,
    read_deploy_config,
    valid_part,
)
from omni_ray.config.sampling import SamplingParams
from omni_ray.errors import ConfigError
from omni_ray.registry import load_pipeline
from omni_ray.serve.resolve import AppArgs, resolve

FILES = sorted((Path(__file__).resolve().parents[2] / "deploy_configs").glob("*.yaml"))


def problems(text: str | bytes, tmp_path: Path) -> list[str]:
    """Problems of a YAML file with this text; the file is called ``F`` in them."""
    path = tmp_path / "deploy.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        parse_deploy_config(*read_deploy_config(path))
    return [line.replace(str(path), "F") for line in caught.value.problems]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_in_deploy_configs_resolves(path: Path):
    """A file's name starts with the pipeline it is for, it says so inside, and everything in it is known."""
    config = parse_deploy_config(*read_deploy_config(path))
    assert config.pipeline == path.name.split(".")[0]
    app = resolve(config.pipeline, AppArgs(deploy_config=str(path)))
    assert [s.stage for s in app.stages] == [s.name for s in load_pipeline(config.pipeline).topological()]


def test_there_are_deploy_configs():
    assert FILES


class TestYaml:
    """Files that are not even a mapping."""

    def test_syntax_error_names_the_line(self, tmp_path):
        (line,) = problems("pipeline: ramp\nstages: {thinker: {}\n", tmp_path)
        assert line.startswith("F: not valid YAML: ")
        assert "line 3" in line

    def test_key_given_twice_names_the_line(self, tmp_path):
        """Plain YAML keeps the last one silently: half of a stage's block is then gone."""
        text = "stages:\n  talker: {engine: {max_num_seqs: 4}}\n  talker: {deployment: {num_replicas: 2}}\n"
        (line,) = problems(text, tmp_path)
        assert "key 'talker' is given twice" in line
        assert "line 3, column 3" in line

    def test_key_given_twice_in_json(self):
        with pytest.raises(ConfigError, match="key 'model' is given twice"):
            read_deploy_config('{"model": "a", "model": "b"}')

    def test_anchors_and_merge_keys(self, tmp_path):
        """``<<: *anchor`` was refused as an unknown tag."""
        path = tmp_path / "d.yaml"
        path.write_text(
            "stages:\n  thinker: &small\n    deployment: {num_replicas: 2}\n"
            "  talker:\n    <<: *small\n    engine: {max_num_seqs: 3}\n"
        )
        config = parse_deploy_config(*read_deploy_config(path))
        assert config.stage("talker") == StageDeployConfig(deployment={"num_replicas": 2}, engine={"max_num_seqs": 3})

    def test_a_key_beside_a_merge_wins(self, tmp_path):
        path = tmp_path / "d.yaml"
        path.write_text("stages:\n  a: &x {engine: {n: 1}}\n  b: {<<: *x, engine: {n: 2}}\n")
        assert read_deploy_config(path)[1]["stages"]["b"] == {"engine": {"n": 2}}

    def test_unfilled_template(self, tmp_path):
        """``{{ .Values.model }}`` from a Helm chart that was never rendered ended in ``TypeError: unhashable``."""
        (line,) = problems("model: {{ model }}\n", tmp_path)
        assert "an unfilled template '{{ ... }}' reads like this" in line
        assert "line 1" in line

    def test_no_python_objects(self, tmp_path):
        (line,) = problems("model: !!python/object/apply:os.system [echo]\n", tmp_path)
        assert "could not determine a constructor for the tag" in line

    def test_tabs(self, tmp_path):
        (line,) = problems("stages:\n\tthinker: {}\n", tmp_path)
        assert "line 2" in line

    def test_not_utf8(self, tmp_path):
        """Saved by an editor in Latin-1: this was a traceback."""
        (line,) = problems("model: /models/caf\u00e9\n".encode("latin-1"), tmp_path)
        assert line.startswith("F: not UTF-8 text: ")

    @pytest.mark.parametrize("text", ["- a\n", "just words\n", "3\n"])
    def test_not_a_mapping(self, text, tmp_path):
        (line,) = problems(text, tmp_path)
        assert line == f"F: must be a mapping with keys {', '.join(DeployConfig.model_fields)}"

    def test_two_documents(self, tmp_path):
        (line,) = problems("model: a\n---\nmodel: b\n", tmp_path)
        assert "expected a single document" in line

    def test_empty_file_is_all_defaults(self, tmp_path):
        path = tmp_path / "d.yaml"
        path.write_text("# nothing yet\n")
        assert parse_deploy_config(*read_deploy_config(path)) == DeployConfig()


class TestSources:
    """A file, an inline mapping, JSON text, or nothing."""

    def test_missing_file_names_node_and_path(self):
        """In a cluster the builder may run on a node without the file; the message must say which node that was."""
        with pytest.raises(ConfigError) as caught:
            read_deploy_config("configs/absent.yaml")
        assert caught.value.problems == (
            f"configs/absent.yaml: cannot be read on node {os.uname().nodename!r}: No such file or directory; "
            f"pass an absolute path or an inline mapping",
        )

    def test_directory(self, tmp_path):
        with pytest.raises(ConfigError, match="Is a directory"):
            read_deploy_config(tmp_path)

    def test_inline_mapping_and_json_are_equal(self):
        inline = {"pipeline": "ramp", "stages": {"talker": {"engine": {"max_num_seqs": 2}}}}
        assert read_deploy_config(inline) == read_deploy_config(f" {json.dumps(inline)}") == ("deploy_config", inline)

    def test_bad_json(self):
        with pytest.raises(ConfigError, match=r"deploy_config: not valid JSON: .*line 1 column 2"):
            read_deploy_config("{pipeline: ramp}")

    def test_nothing(self):
        assert parse_deploy_config(*read_deploy_config(None)) == DeployConfig()

    def test_inline_mapping_is_not_touched(self):
        inline = {"stages": {"x": {"engine": {}, "bad": 1}}}
        before = json.dumps(inline)
        valid_part(read_deploy_config(inline)[1])
        assert json.dumps(inline) == before


class TestKeys:
    """Unknown keys and wrong values."""

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (
                "stage: {}",
                "F: stage: unknown key 'stage'; did you mean 'stages'? known: async_chunk, colocate, ingress, "
                "load_format, model, observe, pipeline, served_model_name, stages, streaming, variant",
            ),
            (
                "stages: {talker: {engin: {}}}",
                "F: stages.talker.engin: unknown key 'engin'; did you mean 'engine'? known: deployment, engine, model, "
                "sampling",
            ),
            (
                "stages: {talker: {sampling: {temprature: 1}}}",
                "F: stages.talker.sampling.temprature: unknown key 'temprature'; did you mean 'temperature'? known: "
                "ignore_eos, max_tokens, repetition_penalty, stop, temperature, top_k, top_p",
            ),
            (
                "streaming: {coalesce: 5}",
                "F: streaming.coalesce: unknown key 'coalesce'; did you mean 'coalesce_ms'? known: coalesce_ms, "
                "first_chunk_timeout_s, idle_timeout_s, inline_bytes, window_mb",
            ),
        ],
    )
    def test_unknown_key_suggests_the_nearest(self, text, expected, tmp_path):
        assert problems(text, tmp_path) == [expected]

    @pytest.mark.parametrize(
        "key", ["inputs", "execution_type", "model_arch", "final_output_type", "owns_tokenizer", "source"]
    )
    def test_topology_is_explained(self, key, tmp_path):
        """Somebody used to vLLM-Omni's YAML tries to rewire stages there."""
        assert problems(f"stages: {{talker: {{{key}: x}}}}", tmp_path) == [
            f"F: stages.talker.{key}: {key!r} is topology; it is frozen in the pipeline's declaration, a deploy config "
            f"only places and sizes; known: deployment, engine, sampling, model"
        ]

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (
                "stages: {talker: {sampling: {temperature: hot}}}",
                "F: stages.talker.sampling.temperature: input should be a valid number, unable to parse string as a "
                "number, got 'hot'",
            ),
            (
                "stages: {talker: {sampling: {top_p: 1.5}}}",
                "F: stages.talker.sampling.top_p: input should be less than or equal to 1, got 1.5",
            ),
            ("load_format: dumy", "F: load_format: input should be 'auto' or 'dummy', got 'dumy'"),
            ("ingress: {max_body_mb: 0}", "F: ingress.max_body_mb: input should be greater than 0, got 0"),
            ("ingress: {grace_s: .inf}", "F: ingress.grace_s: input should be a finite number, got inf"),
            (
                "ingress: {max_audio_seconds: .nan}",
                "F: ingress.max_audio_seconds: input should be a finite number, got nan",
            ),
            ("stages: [talker]", "F: stages: must be a mapping, got ['talker']"),
            (
                "stages: {talker: }",
                "F: stages.talker: must be a mapping with keys deployment, engine, sampling, model, got None",
            ),
            ("stages: {talker: {engine: vllm}}", "F: stages.talker.engine: must be a mapping, got 'vllm'"),
            ("stages: {1: {}}", "F: stages.1: a key must be a name, got 1"),
            ("1: {}", "F: 1: a key must be a name, got 1"),
            (
                "variant: [" + ", ".join(["aaaa"] * 30) + "]",
                "F: variant: must be a mapping, got ['aaaa', 'aaaa', 'aaaa', 'aaaa', 'aaaa', 'aaaa', 'aaaa', ...",
            ),
        ],
    )
    def test_wrong_value_is_shown(self, text, expected, tmp_path):
        assert problems(text, tmp_path) == [expected]

    def test_all_problems_at_once(self, tmp_path):
        found = problems(
            "modle: x\nstages: {a: {engin: {}}, b: {sampling: {top_k: 0}}}\ningress: {retri: no}", tmp_path
        )
        assert [line.split(":")[1].strip() for line in found] == [
            "stages.a.engin", "stages.b.sampling.top_k", "ingress.retri", "modle",
        ]  # fmt: skip


class TestFit:
    """Against the pipeline that is served."""

    def test_misspelt_stage(self):
        config = DeployConfig(stages={"tolker": StageDeployConfig()})
        assert config.problems_for(load_pipeline("ramp"), "F") == [
            "F: stages.tolker: unknown stage 'tolker'; did you mean 'talker'? known: code2wav, talker, thinker"
        ]

    def test_for_another_pipeline(self):
        expected = ["F: pipeline: is 'qwen3_omni', but 'ramp' is being served"]
        assert DeployConfig(pipeline="qwen3_omni").problems_for(load_pipeline("ramp"), "F") == expected

    def test_alias_of_the_pipeline_is_right(self):
        aliased = load_pipeline("ramp").model_copy(update={"aliases": ("slope",)})
        assert DeployConfig(pipeline="slope").problems_for(aliased, "F") == []


class TestValidPart:
    """What is left of a broken config is still checked, so that one mistake does not hide the others."""

    def test_keeps_what_is_right(self):
        raw = {
            "modle": 1,
            "load_format": "dumy",
            "stages": {
                "a": {"engin": {}, "engine": {"x": 1}, "sampling": {"top_k": 0, "top_p": 0.5}},
                1: {},
                "b": None,
                "c": {"sampling": {"stop": ["a", 3]}},
            },
        }
        config = valid_part(raw)
        assert config.load_format == "auto"
        assert set(config.stages) == {"a", "c"}
        assert config.stage("a").engine == {"x": 1}
        assert config.stage("a").sampling == SamplingParams(top_p=0.5)

    @pytest.mark.parametrize("key", ["2024-01-01", "~", "1.5", "yes", "2024-01-01 10:00:00", ".nan"])
    def test_strange_keys_do_not_loop(self, key, tmp_path):
        path = tmp_path / "d.yaml"
        path.write_text(f"{key}: 1\nmodel: x\nstages: {{{key}: {{}}}}\n")
        assert isinstance(valid_part(read_deploy_config(path)[1]), DeployConfig)
        assert len(problems(path.read_text(), tmp_path)) == 2

    @settings(deadline=None)
    @given(
        st.recursive(
            st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.booleans(),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(
                    st.sampled_from(
                        [*DeployConfig.model_fields, "deployment", "engine", "sampling", "top_k", "stop", 3, "zz"]
                    ),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=12,
        )
    )
    def test_always_ends_with_a_config(self, tree):
        assert isinstance(valid_part(tree if isinstance(tree, dict) else {"stages": tree}), DeployConfig)


class TestSamplingPrecedence:
    """sampling constraints > request > deploy YAML > pipeline default."""

    def test_order(self):
        resolved = SamplingParams.resolve(
            constraints=SamplingParams(temperature=0.1),
            request=SamplingParams(temperature=0.2, top_p=0.2),
            deploy=SamplingParams(temperature=0.3, top_p=0.3, top_k=3),
            default=SamplingParams(temperature=0.4, top_p=0.4, top_k=4, max_tokens=4),
        )
        assert resolved == SamplingParams(temperature=0.1, top_p=0.2, top_k=3, max_tokens=4)

    def test_zero_and_false_are_said(self):
        """Greedy (0), ``ignore_eos: false`` and no stop words at all are values, not silence."""
        strong = SamplingParams(temperature=0, ignore_eos=False, stop=())
        weak = SamplingParams(temperature=0.7, ignore_eos=True, stop=("x",))
        assert strong.over(weak) == strong

    @settings(deadline=None)
    @given(st.permutations(range(4)), st.sets(st.integers(0, 3), min_size=1))
    def test_strongest_that_speaks_wins(self, values, speakers):
        said = [SamplingParams(top_k=v + 1) if i in speakers else SamplingParams() for i, v in enumerate(values)]
        resolved = SamplingParams.resolve(constraints=said[0], request=said[1], deploy=said[2], default=said[3])
        assert resolved.top_k == values[min(speakers)] + 1
