"""From a deploy config to exact Serve options: what is derived, what is refused, and in which words."""

import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from ray import serve
from ray.serve.config import AutoscalingConfig

from omni_ray import registry
from omni_ray.config.deploy import DeployConfig, StreamingConfig
from omni_ray.config.ingress import IngressConfig
from omni_ray.config.pipeline import PipelineConfig, StageLimits
from omni_ray.config.sampling import SamplingParams
from omni_ray.errors import ConfigError
from omni_ray.models.ramp import processors
from omni_ray.models.ramp.options import Faults, ThinkerOptions
from omni_ray.registry import OMNI_PIPELINES, engine_options, load_pipeline
from omni_ray.serve.autoscaling import NOT_FOR_STAGES, StageAutoscaling
from omni_ray.serve.cluster import Node, check_fits, needs
from omni_ray.serve.resolve import AppArgs, ResolvedApp, app_args, resolve
from omni_ray.serve.serve_options import MAY_NOT_BE_SET, RayActorOptions, ServeOptions, StageDeployment


def app(**config: Any) -> ResolvedApp:
    return resolve("ramp", AppArgs(deploy_config=config))


def stage(name: str, deployment: dict[str, Any] | None = None, engine: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"stages": {name: {"deployment": deployment or {}, "engine": engine or {}}}}


def derived(resolved: ResolvedApp, name: str) -> ServeOptions:
    return next(d.derived for d in resolved.deployments if d.name == name)


def problems(config: dict[str, Any] | str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve("ramp", AppArgs(deploy_config=config))
    return list(caught.value.problems)


def known(model: type[BaseModel]) -> str:
    return f"known: {', '.join(sorted(model.model_fields))}"


class TestDerived:
    """Options nobody writes."""

    @pytest.mark.parametrize("name", sorted(OMNI_PIPELINES))
    def test_every_pipeline_resolves_without_a_config(self, name: str):
        resolved = resolve(name, AppArgs())
        assert [s.stage for s in resolved.stages] == [s.name for s in load_pipeline(name).topological()]
        assert resolved.ingress.model_name == name
        for spec in resolved.deployments:
            assert resolved.calls(spec) <= {s.stage for s in resolved.stages}
        for spec in resolved.stages:
            assert isinstance(spec.engine_options, engine_options(resolved.pipeline.stage(spec.stage)))

    @pytest.mark.parametrize("name", sorted(OMNI_PIPELINES))
    def test_ray_serve_accepts_what_is_derived(self, name: str):
        """Every derived option is one that this Ray Serve knows, with a value it takes."""

        class Nothing: ...

        resolved = resolve(name, AppArgs())
        for options in [*(d.derived for d in resolved.deployments), resolved.ingress.derived]:
            serve.deployment(Nothing, name="x", **options.serve)

    def test_ray_serve_accepts_everything_that_can_be_said(self):
        class Nothing: ...

        block = {
            "autoscaling_config": {"min_replicas": 1, "max_replicas": 3, "upscale_delay_s": 5},
            "ray_actor_options": {
                "num_cpus": 2, "num_gpus": 0.5, "memory": 1e9, "resources": {"tpu": 1}, "accelerator_type": "H200",
                "label_selector": {"region": "a"}, "runtime_env": {"env_vars": {"A": "1"}},
            },
            "placement_group_strategy": "PACK",
            "health_check_period_s": 1,
            "health_check_timeout_s": 2,
            "max_constructor_retry_count": 1,
            "rolling_update_percentage": 0.5,
            "logging_config": {"log_level": "DEBUG"},
        }  # fmt: skip
        options = derived(app(**stage("talker", block)), "talker").serve
        serve.deployment(Nothing, name="x", **options)
        assert options["rolling_update_percentage"] == 0.5
        assert options["logging_config"] == {"log_level": "DEBUG"}
        assert type(options["autoscaling_config"]) is AutoscalingConfig, "the controller knows Serve's own class only"
        assert options["autoscaling_config"].upscale_delay_s == 5

    def test_grace_outlives_the_longest_stream(self):
        """Design 6: grace = max_audio_seconds + 30 s; with Serve's default of 20 s an upgrade cuts speech (C70)."""
        assert {d.derived.graceful_shutdown_timeout_s for d in app().deployments} == {330}
        resolved = app(ingress={"max_audio_seconds": 12.5})
        assert {d.derived.graceful_shutdown_timeout_s for d in resolved.deployments} == {math.ceil(42.5)}
        assert app(ingress={"grace_s": 2}).ingress.derived.serve["graceful_shutdown_timeout_s"] == 2

    @pytest.mark.parametrize("ingress", [{}, {"num_replicas": 3}, {"autoscaling_config": {"max_replicas": 4}}])
    @pytest.mark.parametrize("admitted", [1, 256])
    def test_serve_never_queues(self, ingress: dict[str, Any], admitted: int):
        """A stage takes more than all ingress replicas together may admit; only the engine's queue is bounded."""
        resolved = app(ingress={"max_concurrent_requests": admitted, "deployment": ingress})
        replicas = resolved.ingress.derived.num_replicas
        for spec in resolved.deployments:
            assert spec.derived.max_ongoing_requests > admitted * replicas
            assert "max_queued_requests" not in spec.derived.serve
        assert resolved.ingress.derived.max_ongoing_requests > admitted, "or Serve would queue what should be a 503"

    def test_cpu_stages_are_small_and_have_no_placement_group(self):
        for options in [*(d.derived for d in app().deployments), app().ingress.derived]:
            assert options.serve["ray_actor_options"] == {"num_cpus": 0.1, "num_gpus": 0}
            assert "placement_group_bundles" not in options.serve

    def test_num_replicas_alone_works(self):
        """C69: more replicas and nothing else; nobody lists devices."""
        options = derived(app(**stage("talker", {"num_replicas": 2})), "talker")
        assert (options.num_replicas, options.serve["num_replicas"]) == (2, 2)

    def test_sampling_and_streaming_reach_the_stage(self):
        resolved = app(stages={"thinker": {"sampling": {"top_k": 3}}}, streaming={"coalesce_ms": 5}, async_chunk=False)
        spec = next(s for s in resolved.stages if s.stage == "thinker")
        assert (spec.sampling, spec.streaming.coalesce_ms, spec.async_chunk) == (SamplingParams(top_k=3), 5, False)

    def test_who_calls_whom(self):
        resolved = app()
        assert {d.name: set(resolved.calls(d)) for d in resolved.deployments} == {
            "thinker": set(), "talker": {"thinker"}, "code2wav": {"talker"},
        }  # fmt: skip


class TestGpus:
    """C62, C63: what Serve reserves is what the replica's actor asks for."""

    @pytest.mark.parametrize(
        "actor",
        [
            {"num_gpus": 1},
            {"num_gpus": 0.3, "num_cpus": 2},
            {"num_gpus": 2, "memory": 8e9, "resources": {"nvme": 1}},
            {"num_gpus": 1, "accelerator_type": "H200"},
        ],
    )
    def test_bundle_0_equals_the_actor(self, actor: dict[str, Any]):
        """With ``accelerator_type`` Ray asks for one more resource, which the bundle lacked: no replica started."""
        options = derived(app(**stage("talker", {"ray_actor_options": actor})), "talker").serve
        asked = options["ray_actor_options"]
        wants = {"CPU": asked["num_cpus"], "GPU": asked["num_gpus"], **asked.get("resources", {})}
        if "memory" in asked:
            wants["memory"] = asked["memory"]
        if "accelerator_type" in asked:
            wants[f"accelerator_type:{asked['accelerator_type']}"] = 0.001
        assert options["placement_group_bundles"] == [wants]
        assert asked["num_gpus"] == actor["num_gpus"], "a bundle's GPU alone leaves CUDA_VISIBLE_DEVICES empty (C62)"
        assert options["placement_group_strategy"] == "STRICT_PACK"

    def test_three_fractions_fit_one_gpu(self):
        """C63: three GPU stages at 0.3 on one GPU."""
        third = {"deployment": {"ray_actor_options": {"num_gpus": 0.3}}}
        resolved = app(stages={"thinker": third, "talker": third, "code2wav": third})
        assert sum(n.each.get("GPU", 0) * n.replicas for n in needs(resolved)) == pytest.approx(0.9)
        check_fits(resolved, [node(CPU=1, GPU=1)])

    def test_labels_select_the_groups_node_too(self):
        """A group reserved on any node, an actor bound to labelled ones: the replica would wait for ever."""
        actor = {"num_gpus": 1, "label_selector": {"gpu": "h200"}}
        options = derived(app(**stage("talker", {"ray_actor_options": actor})), "talker").serve
        assert options["placement_group_bundle_label_selector"] == [{"gpu": "h200"}]
        assert options["ray_actor_options"]["label_selector"] == {"gpu": "h200"}

    def test_strategy_may_be_set(self):
        options = derived(
            app(**stage("talker", {"ray_actor_options": {"num_gpus": 1}, "placement_group_strategy": "PACK"})), "talker"
        )
        assert options.serve["placement_group_strategy"] == "PACK"


class TestAutoscaling:
    """By listeners' slack, strictly."""

    def test_it_replaces_num_replicas(self):
        options = derived(
            app(**stage("talker", {"autoscaling_config": {"min_replicas": 1, "max_replicas": 3}})), "talker"
        )
        assert options.autoscaled
        assert options.num_replicas == 3, "what the cluster must hold"
        assert "num_replicas" not in options.serve

    def test_the_policy_travels_inside(self):
        """What the controller unpickles is our policy, with what the deploy config says."""
        block = {"min_replicas": 2, "max_replicas": 3, "slack_s": 0.5, "report_every_s": 0.2}
        options = derived(app(**stage("talker", {"autoscaling_config": block})), "talker")
        config = options.serve["autoscaling_config"]
        assert config.policy.get_policy().__name__ == "SlackPolicy"
        assert config.policy.policy_kwargs == {"target_load": 0.8, "slack_s": 0.5, "wait_s": 1}
        assert (config.metrics_interval_s, config.look_back_period_s) == (0.2, 1), "Serve records a fifth of it apart"
        assert (options.min_replicas, options.num_replicas) == (2, 3)

    @pytest.mark.parametrize("name", sorted(NOT_FOR_STAGES))
    def test_what_means_nothing_says_why(self, name: str):
        (line,) = problems(stage("talker", {"autoscaling_config": {"max_replicas": 8, name: 3}}))
        assert line.startswith(
            f"deploy_config: stages.talker.deployment.autoscaling_config: {name}: {NOT_FOR_STAGES[name]}, got "
        )

    def test_the_ingress_scales_as_serve_does(self):
        """It holds each request once, so their number says what it has to do."""
        block = {"max_replicas": 4, "target_ongoing_requests": 100}
        options = app(ingress={"deployment": {"autoscaling_config": block}}).ingress.derived
        assert options.serve["autoscaling_config"].policy.is_default_policy_function()
        assert options.serve["autoscaling_config"].target_ongoing_requests == 100

    def test_no_stage_goes_to_zero(self):
        (line,) = problems(stage("talker", {"autoscaling_config": {"min_replicas": 0}}))
        assert "autoscaling_config.min_replicas: input should be greater than or equal to 1" in line

    def test_a_typo_is_not_dropped(self):
        """Ray's own model ignores unknown keys: ``max_replica: 8`` silently meant one replica."""
        assert problems(stage("talker", {"autoscaling_config": {"max_replica": 8}})) == [
            "deploy_config: stages.talker.deployment.autoscaling_config.max_replica: unknown key 'max_replica'; did "
            f"you mean 'max_replicas'? {known(StageAutoscaling)}"
        ]

    def test_a_typo_in_logging_config_is_found_before_anything_starts(self):
        (line,) = problems(stage("talker", {"logging_config": {"level": "DEBUG"}}))
        assert line.startswith("deploy_config: stages.talker.deployment.logging_config.level: unknown key 'level'; ")


@pytest.mark.parametrize("option", sorted(MAY_NOT_BE_SET))
@pytest.mark.parametrize("where", ["stages.talker.deployment", "ingress.deployment"])
def test_options_that_may_not_be_set_say_why(option: str, where: str):
    block = {"deployment": {option: 1}}
    config: dict[str, Any] = {"ingress": block} if where.startswith("ingress") else {"stages": {"talker": block}}
    assert problems(config) == [f"deploy_config: {where}.{option}: may not be set: {MAY_NOT_BE_SET[option]}"]


class TestLimits:
    """Hard limits of an implementation."""

    @pytest.fixture
    def limited(self, monkeypatch: pytest.MonkeyPatch) -> PipelineConfig:
        ramp = load_pipeline("ramp")
        limits = StageLimits(max_num_seqs=1, reason="its decoder keeps one shared state")
        stages = tuple(s.model_copy(update={"limits": limits}) if s.name == "talker" else s for s in ramp.stages)
        made = types.ModuleType("limited_pipeline")
        made.PIPELINE = ramp.model_copy(update={"stages": stages})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, made.__name__, made)
        monkeypatch.setitem(registry.OMNI_PIPELINES, "ramp", "limited_pipeline:PIPELINE")
        return made.PIPELINE

    def test_more_is_refused_with_the_reason(self, limited):
        assert problems(stage("talker", engine={"max_num_seqs": 4})) == [
            "deploy_config: stages.talker.engine.max_num_seqs: 4 is more than 1, the limit of RampTalker: its decoder "
            "keeps one shared state"
        ]

    def test_the_default_shrinks_to_it(self, limited):
        """TalkerOptions' own default is 64; an operator who says nothing gets the limit, not an error."""
        assert next(s for s in app().stages if s.stage == "talker").engine_options.max_num_seqs == 1

    def test_the_limit_itself_is_fine(self, limited):
        app(**stage("talker", engine={"max_num_seqs": 1}))

    @pytest.mark.parametrize(("key", "limit"), [("max_audio_seconds", 300), ("max_input_audio_seconds", 600)])
    def test_audio_beyond_what_the_models_are_good_for(self, key: str, limit: int):
        assert problems({"ingress": {key: 100_000}}) == [
            f"deploy_config: ingress.{key}: 100000 is beyond the {limit} s that pipeline 'ramp' is good for"
        ]
        app(ingress={key: limit})


class TestArguments:
    """Arguments of an application."""

    def test_unknown_arguments_suggest(self):
        with pytest.raises(ConfigError) as caught:
            app_args({"modle": "x", "deploy_configs": "y"})
        names = "known: deploy_config, model, served_model_name"
        assert caught.value.problems == (
            f"unknown argument 'modle'; did you mean 'model'? {names}; unknown argument 'deploy_configs'; did you mean "
            f"'deploy_config'? {names}",
        )

    @pytest.mark.parametrize("name", ["model", "deploy_config", "served_model_name"])
    def test_blank_argument_names_itself(self, name: str):
        """``model=$MODEL`` with the variable unset: it was ignored, and another model served."""
        with pytest.raises(ConfigError) as caught:
            app_args({name: ""})
        assert caught.value.problems == (f"argument {name!r}: is empty; give a value or leave it out",)

    def test_arguments_win_over_the_config(self):
        config = {"model": "a", "served_model_name": "a"}
        resolved = resolve("ramp", AppArgs(model="b", served_model_name="c", deploy_config=config))
        assert {s.model for s in resolved.stages} == {"b"}
        assert resolved.ingress.model_name == "c"
        resolved = resolve("ramp", AppArgs(deploy_config=config))
        assert ({s.model for s in resolved.stages}, resolved.ingress.model_name) == ({"a"}, "a")

    def test_unknown_pipeline_and_a_broken_config_together(self):
        with pytest.raises(ConfigError) as caught:
            resolve("rampp", AppArgs(deploy_config={"modle": "x"}))
        first, second = caught.value.problems
        assert first.startswith("unknown pipeline 'rampp'; did you mean 'ramp'?")
        assert second.startswith("deploy_config: modle: unknown key")

    def test_unregistered_architecture(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.delitem(registry._MODELS, "RampTalker")
        assert problems({}) == ["pipeline 'ramp', stage 'talker': model_arch 'RampTalker' is not registered"]

    def test_a_processor_that_is_no_async_generator(self, monkeypatch: pytest.MonkeyPatch):
        """C60: a plain coroutine where a stream is declared is found before any actor starts, as is a typo."""

        async def waits_for_all(request: Any, chunks: Any) -> list[Any]:
            return []

        monkeypatch.setattr(processors, "frames_of_talker", waits_for_all)
        monkeypatch.delattr(processors, "rows_of_thinker")
        typo, plain = problems({})
        path = "omni_ray.models.ramp.processors"
        assert typo.startswith(
            f"pipeline 'ramp', stage 'talker', processor: '{path}:rows_of_thinker' cannot be imported"
        )
        assert plain == (
            f"pipeline 'ramp', stage 'code2wav': processor '{path}:frames_of_talker' is no async generator; write "
            f"`async def` with `yield`"
        )


def node(name: str = "n", labels: dict[str, str] | None = None, **resources: float) -> Node:
    return Node(name, resources, labels or {})


class TestCheckFits:
    """C64: Serve would wait for ever; we say stage, needed and available before anything starts."""

    def test_accelerator_type_the_cluster_does_not_have(self):
        resolved = app(**stage("talker", {"ray_actor_options": {"num_gpus": 1, "accelerator_type": "H200"}}))
        with pytest.raises(ConfigError) as caught:
            check_fits(resolved, [node(CPU=2, GPU=1, **{"accelerator_type:A10": 1})])
        assert caught.value.problems == (
            "talker needs 0.1 CPU + 1 GPU + 0.001 accelerator_type:H200 for each of 1 replicas; 0 of them fit beside "
            "the other deployments: no node offers 0.001 accelerator_type:H200, the most is 0 accelerator_type:H200",
        )
        check_fits(resolved, [node(CPU=2, GPU=1, **{"accelerator_type:H200": 1})])

    def test_two_gpus_needed_one_there(self):
        gpu = {"deployment": {"ray_actor_options": {"num_gpus": 1}}}
        with pytest.raises(ConfigError) as caught:
            check_fits(app(stages={"thinker": gpu, "talker": gpu}), [node("10.0.0.1", CPU=8, GPU=1)])
        assert caught.value.problems == (
            "talker needs 0.1 CPU + 1 GPU for each of 1 replicas; 0 of them fit beside the other deployments: node "
            "10.0.0.1 comes nearest and has 0 GPU left",
        )

    def test_a_sum_over_nodes_is_no_room(self):
        """Half the CPUs on each of two nodes: the cluster's total is enough, and the replica waits for ever."""
        resolved = app(**stage("talker", {"ray_actor_options": {"num_cpus": 6}}))
        with pytest.raises(ConfigError, match="no node offers 6 CPU, the most is 4 CPU"):
            check_fits(resolved, [node(CPU=4), node(CPU=4)])
        check_fits(resolved, [node(CPU=4), node(CPU=8)])

    def test_a_fraction_is_never_split_over_two_gpus(self):
        config = stage("talker", {"num_replicas": 3, "ray_actor_options": {"num_gpus": 0.6}})
        with pytest.raises(ConfigError, match=r"2 of them fit beside .* has no single GPU with 0.6 left"):
            check_fits(app(**config), [node(CPU=4, GPU=2)])
        check_fits(app(**config), [node(CPU=4, GPU=2), node(CPU=4, GPU=1)])

    def test_whole_gpus_are_placed_before_fractions(self):
        """In the order data flows, the fraction would have broken the only whole GPU of the node that has two."""
        stages = {
            "thinker": {"deployment": {"ray_actor_options": {"num_gpus": 0.5}}},
            "talker": {"deployment": {"ray_actor_options": {"num_gpus": 2}}},
        }
        check_fits(app(stages=stages), [node(CPU=4, GPU=2), node(CPU=4, GPU=1)])

    def test_labels_and_the_limit_per_node(self):
        actor = {"label_selector": {"omni-stage": "in(talker, any)"}}
        config = stage("talker", {"num_replicas": 2, "max_replicas_per_node": 1, "ray_actor_options": actor})
        talkers = [node(str(i), {"omni-stage": "talker"}, CPU=1) for i in range(2)]
        with pytest.raises(ConfigError, match=r"on a node with omni-stage=in\(talker, any\).*no node has the labels"):
            check_fits(app(**config), [node(labels={"omni-stage": "thinker"}, CPU=8)])
        with pytest.raises(ConfigError, match=r"1 of them fit beside .* 1 of them, the most that a node may hold"):
            check_fits(app(**config), [node(CPU=8), talkers[0]])
        check_fits(app(**config), talkers)

    def test_memory_counts(self):
        """A stage that asks for more memory than any node has waited for ever, unreported."""
        resolved = app(**stage("talker", {"ray_actor_options": {"memory": 2**40}}))
        with pytest.raises(ConfigError, match=r"no node offers 1.02e.03 GiB memory, the most is 8 GiB memory"):
            check_fits(resolved, [node(CPU=2, memory=2**33)])

    def test_custom_resources_and_replicas(self):
        resolved = app(**stage("talker", {"num_replicas": 3, "ray_actor_options": {"resources": {"tpu": 2}}}))
        with pytest.raises(ConfigError, match=r"talker needs 0.1 CPU . 2 tpu for each of 3 replicas; 2 of them fit"):
            check_fits(resolved, [node(CPU=2, tpu=4)])

    def test_ramp_fits_a_laptop(self):
        check_fits(app(), [node(CPU=1)])
        check_fits(app(), [node(CPU=0.4)])


BLOCKS = {
    "top": known(DeployConfig),
    "ingress": known(IngressConfig),
    "sampling": known(SamplingParams),
    "deployment": known(StageDeployment),
    "actor": known(RayActorOptions),
    "autoscaling": known(StageAutoscaling),
    "engine": known(ThinkerOptions),
    "faults": known(Faults),
}
TOPOLOGY = (
    "is topology; it is frozen in the pipeline's declaration, a deploy config only places and sizes; known: "
    "deployment, engine, sampling, model"
)

WORST = {
    "a misspelling in every block": (
        """\
pipeline: rampp
modle: /models/x
async_chunk: maybe
stages:
  tolker:
    deployment: {num_replicas: 2}
  thinker:
    deployment: {num_replica: 2, ray_actor_options: {num_gpu: 1}, autoscaling_config: {max_replica: 3}}
    engine: {max_num_seq: 4, faults: {fail: 3}}
    sampling: {temprature: 0.7}
ingress: {max_audio_second: 10, deployment: {num_replica: 3}}
""",
        [
            "F: async_chunk: input should be a valid boolean, unable to interpret input, got 'maybe'",
            f"F: stages.thinker.sampling.temprature: unknown key 'temprature'; did you mean 'temperature'? "
            f"{BLOCKS['sampling']}",
            f"F: ingress.max_audio_second: unknown key 'max_audio_second'; did you mean 'max_audio_seconds'? "
            f"{BLOCKS['ingress']}",
            f"F: modle: unknown key 'modle'; did you mean 'model'? {BLOCKS['top']}",
            "F: stages.tolker: unknown stage 'tolker'; did you mean 'talker'? known: code2wav, talker, thinker",
            "F: pipeline: is 'rampp', but 'ramp' is being served",
            f"F: ingress.deployment.num_replica: unknown key 'num_replica'; did you mean 'num_replicas'? "
            f"{BLOCKS['deployment']}",
            f"F: stages.thinker.engine.faults.fail: unknown key 'fail'; did you mean 'fail_at'? {BLOCKS['faults']}",
            f"F: stages.thinker.engine.max_num_seq: unknown key 'max_num_seq'; did you mean 'max_num_seqs'? "
            f"{BLOCKS['engine']}",
            "F: stages.thinker.deployment.ray_actor_options.num_gpu: unknown key 'num_gpu'; did you mean 'num_gpus'? "
            f"{BLOCKS['actor']}",
            "F: stages.thinker.deployment.autoscaling_config.max_replica: unknown key 'max_replica'; did you mean "
            f"'max_replicas'? {BLOCKS['autoscaling']}",
            "F: stages.thinker.deployment.num_replica: unknown key 'num_replica'; did you mean 'num_replicas'? "
            f"{BLOCKS['deployment']}",
        ],
    ),
    "ported from vLLM-Omni and from plain Ray Serve": (
        """\
stages:
  0: {runtime: {devices: "0"}}
  thinker:
    model_arch: Qwen3OmniMoeForConditionalGeneration
    inputs: [request]
    deployment:
      name: thinker-a
      max_ongoing_requests: 10
      max_queued_requests: 5
      user_config: {temperature: 1}
      graceful_shutdown_timeout_s: 20
      placement_group_bundles: [{GPU: 1, CPU: 1}]
    engine: {name: vllm, gpu_memory_utilization: 0.5}
""",
        [
            "F: stages.0: a key must be a name, got 0",
            "F: stages.0.runtime: unknown key 'runtime'; known: deployment, engine, model, sampling",
            f"F: stages.thinker.model_arch: 'model_arch' {TOPOLOGY}",
            f"F: stages.thinker.inputs: 'inputs' {TOPOLOGY}",
            "F: stages.thinker.engine.name: 'vllm' is not allowed here; known: per_request",
            "F: stages.thinker.deployment.name: may not be set: a stage's name is its deployment's name",
            "F: stages.thinker.deployment.max_ongoing_requests: may not be set: derived from "
            "ingress.max_concurrent_requests; the engine's limit is engine.max_num_seqs",
            "F: stages.thinker.deployment.max_queued_requests: may not be set: Serve never queues here; the bounded "
            "queue is engine.max_queue",
            "F: stages.thinker.deployment.user_config: may not be set: all settings go through this deploy config",
            "F: stages.thinker.deployment.graceful_shutdown_timeout_s: may not be set: derived from "
            "ingress.max_audio_seconds, or set by ingress.grace_s",
            "F: stages.thinker.deployment.placement_group_bundles: may not be set: derived from ray_actor_options and "
            "the engine's options",
        ],
    ),
    "options that contradict each other": (
        """\
stages:
  thinker:
    deployment:
      num_replicas: 2
      autoscaling_config: {min_replicas: 1, max_replicas: 4}
      ray_actor_options: {num_gpus: 1.5}
      max_replicas_per_node: 1
  talker:
    deployment: {autoscaling_config: {min_replicas: 5, max_replicas: 2}}
  code2wav:
    deployment: {placement_group_strategy: PACK}
ingress:
  max_audio_seconds: 100000
  max_input_audio_seconds: 100000
  deployment: {num_replicas: 1, autoscaling_config: {}}
""",
        [
            "F: ingress.max_audio_seconds: 100000 is beyond the 300 s that pipeline 'ramp' is good for",
            "F: ingress.max_input_audio_seconds: 100000 is beyond the 600 s that pipeline 'ramp' is good for",
            "F: stages.thinker.deployment: num_replicas and autoscaling_config exclude each other; keep one",
            "F: stages.thinker.deployment.ray_actor_options.num_gpus: 1.5 is neither a fraction nor whole",
            "F: stages.thinker.deployment.max_replicas_per_node: not combinable with a placement group (num_gpus)",
            "F: stages.talker.deployment.autoscaling_config: min_replicas <= initial_replicas <= max_replicas does not "
            "hold, got {'min_replicas': 5, 'max_replicas': 2}",
            "F: stages.code2wav.deployment.placement_group_strategy: has no effect without num_gpus",
            "F: ingress.deployment: num_replicas and autoscaling_config exclude each other; keep one",
        ],
    ),
    "right keys, wrong values": (
        """\
load_format: gguf
stages:
  thinker:
    deployment: {num_replicas: auto, ray_actor_options: {num_cpus: two, resources: {tpu: many}, memory: .inf}}
    engine: {max_num_seqs: 0, queue_timeout_s: .inf}
    sampling: {temperature: 3, top_p: -1, stop: "###", max_tokens: 1.5}
  talker:
    engine: {name: [ar]}
  code2wav:
streaming: {coalesce_ms: -1, window_mb: .nan}
ingress: {retry: sometimes, deployment: []}
""",
        [
            "F: load_format: input should be 'auto' or 'dummy', got 'gguf'",
            "F: stages.thinker.sampling.temperature: input should be less than or equal to 2, got 3",
            "F: stages.thinker.sampling.top_p: input should be greater than or equal to 0, got -1",
            "F: stages.thinker.sampling.max_tokens: input should be a valid integer, got a number with a fractional "
            "part, got 1.5",
            "F: stages.thinker.sampling.stop: input should be a valid tuple, got '###'",
            "F: stages.code2wav: must be a mapping with keys deployment, engine, sampling, model, got None",
            "F: streaming.coalesce_ms: input should be greater than or equal to 0, got -1",
            "F: streaming.window_mb: input should be a finite number, got nan",
            "F: ingress.deployment: must be a mapping, got []",
            "F: ingress.retry: input should be a valid boolean, unable to interpret input, got 'sometimes'",
            "F: stages.thinker.engine.max_num_seqs: input should be greater than or equal to 1, got 0",
            "F: stages.thinker.engine.queue_timeout_s: input should be a finite number, got inf",
            "F: stages.thinker.deployment.num_replicas: input should be a valid integer, got 'auto'",
            "F: stages.thinker.deployment.ray_actor_options.num_cpus: input should be a valid number, unable to parse "
            "string as a number, got 'two'",
            "F: stages.thinker.deployment.ray_actor_options.memory: input should be a finite number, got inf",
            "F: stages.thinker.deployment.ray_actor_options.resources.tpu: input should be a valid number, unable to "
            "parse string as a number, got 'many'",
            "F: stages.talker.engine.name: must be an engine's name, got ['ar']",
        ],
    ),
    "a list where a mapping belongs": (
        """\
pipeline: [ramp]
stages:
  - thinker: {engine: {max_num_seqs: 4}}
  - talker: {deployment: {num_replica: 2}}
streaming: 20
ingress: 8000
variant: thinking
""",
        [
            "F: pipeline: input should be a valid string, got ['ramp']",
            "F: variant: must be a mapping, got 'thinking'",
            "F: stages: must be a mapping, got [{'thinker': {'engine': {'max_num_seqs': 4}}}, {'talker':...",
            f"F: streaming: must be a mapping with keys {', '.join(StreamingConfig.model_fields)}, got 20",
            f"F: ingress: must be a mapping with keys {', '.join(IngressConfig.model_fields)}, got 8000",
        ],
    ),
}
"""The five worst deploy configs an operator might write, and one sentence for each of their mistakes."""


@pytest.mark.parametrize("title", WORST)
def test_the_five_worst_deploy_configs(title: str, tmp_path: Path):
    """One message per mistake, all at once; a broken top level used to hide every mistake below it."""
    text, expected = WORST[title]
    path = tmp_path / "ramp.yaml"
    path.write_text(text)
    assert [line.replace(str(path), "F") for line in problems(str(path))] == expected
