"""``serve run graphs:<pipeline>`` and ``serve build graphs.built:<pipeline>``."""

import inspect

import pytest
from pydantic import ValidationError
from ray import serve
from ray._common.utils import import_attr
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app

import graphs
import graphs.built
from omni_ray.config.pipeline import PipelineConfig
from omni_ray.errors import ConfigError
from omni_ray.registry import OMNI_PIPELINES, load_pipeline
from omni_ray.serve.resolve import AppArgs, resolve

PIPELINES = sorted(OMNI_PIPELINES)


def built(app: serve.Application):
    """Serve's own view of an application: its deployments by name."""
    return {d.name: d for d in build_app(app, name="x").deployments}


@pytest.mark.parametrize("name", PIPELINES)
def test_builder_is_what_ray_serve_wants(name: str):
    """A plain function of one parameter annotated with the class itself: else Serve passes an unchecked dict."""
    builder = import_attr(f"graphs:{name}")
    assert inspect.isfunction(builder)
    (parameter,) = inspect.signature(builder).parameters.values()
    assert parameter.annotation is AppArgs
    assert builder.__name__ == name


@pytest.mark.parametrize("name", PIPELINES)
def test_application_has_one_deployment_per_stage(name: str):
    """Stage name = deployment name, and the ingress; nothing is started to build it."""
    app = call_user_app_builder_with_args_if_necessary(import_attr(f"graphs:{name}"), {})
    assert isinstance(app, serve.Application)
    deployments = built(app)
    assert set(deployments) == {*(s.name for s in load_pipeline(name).stages), "ingress"}
    resolved = resolve(name, AppArgs())
    for spec in resolved.deployments:
        config = deployments[spec.name]._deployment_config
        assert config.max_ongoing_requests == spec.derived.max_ongoing_requests
        assert config.graceful_shutdown_timeout_s == spec.derived.graceful_shutdown_timeout_s
        assert config.max_queued_requests == -1, "Serve queues nothing, and refuses nothing"


@pytest.mark.parametrize("name", PIPELINES)
def test_built_is_an_application(name: str):
    """``serve build`` takes no functions."""
    app = import_attr(f"graphs.built:{name}")
    assert isinstance(app, serve.Application)
    with pytest.raises(ValueError, match="not an already built application"):
        call_user_app_builder_with_args_if_necessary(app, {"model": "x"})


@pytest.mark.parametrize(("module", "called"), [(graphs, "graphs"), (graphs.built, "graphs.built")])
def test_unknown_attribute_lists_the_known_ones(module, called):
    with pytest.raises(AttributeError) as caught:
        module.rampp  # noqa: B018 - the look-up is the test
    assert str(caught.value) == (f"no pipeline 'rampp' in {called}; did you mean 'ramp'? known: {', '.join(PIPELINES)}")
    assert not hasattr(module, "__wrapped__"), "dunder look-ups by inspect and pytest must stay quiet"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"modle": "x"}, "unknown argument 'modle'; did you mean 'model'?"),
        ({"deploy_config": ""}, "is empty; give a value or leave it out"),
        ({"model": 3}, "Input should be a valid string"),
    ],
)
def test_arguments_are_validated_by_serve(args, message):
    """Serve validates ``args:`` against the annotation; with postponed annotations the builder got a raw dict."""
    with pytest.raises(ValidationError, match=message.replace("?", "\\?")):
        call_user_app_builder_with_args_if_necessary(graphs.ramp, args)


def test_problems_of_the_deploy_config_reach_the_caller():
    with pytest.raises(ConfigError, match=r"stages\.tolker: unknown stage 'tolker'"):
        call_user_app_builder_with_args_if_necessary(graphs.ramp, {"deploy_config": {"stages": {"tolker": {}}}})


def test_deploy_config_reaches_the_deployments():
    config = {"stages": {"talker": {"deployment": {"num_replicas": 2, "ray_actor_options": {"num_gpus": 0.5}}}}}
    talker = built(graphs.ramp(AppArgs(deploy_config=config)))["talker"]
    assert talker._deployment_config.num_replicas == 2
    assert talker._replica_config.placement_group_bundles == [{"CPU": 0.1, "GPU": 0.5}]
    assert talker._replica_config.ray_actor_options["num_gpus"] == 0.5


def test_builder_has_no_side_effects_and_can_be_called_twice():
    """C67: a Serve config is built again on every deploy."""
    assert set(built(graphs.ramp(AppArgs()))) == set(built(graphs.ramp(AppArgs())))


def test_pipelines_are_no_modules():
    """A file ``graphs/<pipeline>.py`` would shadow the builder of that name."""
    for name in PIPELINES:
        assert inspect.isfunction(getattr(graphs, name))
        assert isinstance(load_pipeline(name), PipelineConfig)
