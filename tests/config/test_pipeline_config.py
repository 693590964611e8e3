"""Pipeline declarations: everything wrong is found at once, and nothing can be changed afterwards."""

import pytest
from pydantic import ValidationError

from omni_ray.config.pipeline import Edge, PipelineConfig, StageExecutionType, StageLimits, StagePipelineConfig, Voices
from omni_ray.registry import OMNI_PIPELINES, load_pipeline


def edge(source: str = "request", **changes: object) -> Edge:
    parts = ("messages",) if source == "request" else ()
    return Edge.model_validate({"source": source, "processor": "pkg.processors:convert", "parts": parts} | changes)


def stage(name: str, *inputs: Edge, makes: str | None = None, **changes: object) -> StagePipelineConfig:
    given: dict[str, object] = {
        "name": name,
        "execution_type": StageExecutionType.LLM_AR,
        "model_arch": "Arch",
        "inputs": inputs or (edge(),),
        "final_output_type": makes,
    }
    return StagePipelineConfig.model_validate(given | changes)


def pipeline(*stages: StagePipelineConfig, **changes: object) -> PipelineConfig:
    return PipelineConfig.model_validate({"name": "p", "description": "x", "stages": stages} | changes)


@pytest.mark.parametrize("name", sorted(OMNI_PIPELINES))
def test_registered_pipelines_have_no_problems(name: str):
    assert load_pipeline(name).problems() == []


def test_everything_wrong_is_found_at_once():
    """A declaration with one mistake per rule: one sentence each, in one list."""
    declared = pipeline(
        stage("thinker", edge("request", parts=()), makes="text"),
        stage("thinker", edge("zzz"), makes="text"),
        stage("ingress", edge("thinkr", processor="pkg.nocolon")),
        stage("request", edge("request", carries_refs=True)),
        voices=Voices(names=("a", "b"), default="bb"),
    )
    assert declared.problems() == [
        "pipeline 'p': stage 'thinker' is declared twice",
        "pipeline 'p', stage 'thinker', inputs[0].parts: a request edge must list the request parts it takes",
        "pipeline 'p', stage 'thinker', inputs[0].source: unknown stage 'zzz'; known: ingress, request, thinker",
        "pipeline 'p', stage 'ingress': the name 'ingress' is reserved",
        "pipeline 'p', stage 'ingress', inputs[0].source: unknown stage 'thinkr'; did you mean 'thinker'? "
        "known: ingress, request, thinker",
        "pipeline 'p', stage 'ingress', inputs[0].processor: 'pkg.nocolon' is no 'module:function'",
        "pipeline 'p', stage 'request': the name 'request' is reserved",
        "pipeline 'p', stage 'request', inputs[0].carries_refs: a request edge has no upstream stage",
        "pipeline 'p': text is the final output of thinker and thinker; one may be",
        "pipeline 'p': voices.default 'bb' is unknown; did you mean 'b'? known: a, b",
    ]


def test_no_output_at_all():
    expected = ["pipeline 'p': no stage has a final_output_type, nothing can be asked for"]
    assert pipeline(stage("a")).problems() == expected


def test_two_stages_with_one_output_kind():
    declared = pipeline(stage("a", makes="text"), stage("b", edge("a"), makes="text"))
    assert declared.problems() == ["pipeline 'p': text is the final output of a and b; one may be"]


def test_cycle_names_its_stages_only():
    declared = pipeline(stage("a", makes="text"), stage("b", edge("c")), stage("c", edge("b")))
    assert declared.problems() == ["pipeline 'p': cycle among stages b, c"]


def test_a_stage_fed_by_itself_is_a_cycle():
    assert pipeline(stage("a", edge("a"), makes="text")).problems() == ["pipeline 'p': cycle among stages a"]


def test_default_voice_without_voices():
    declared = pipeline(stage("a", makes="audio"), voices=Voices(default="a"))
    assert declared.problems() == ["pipeline 'p': voices.default 'a' is unknown; known: none"]


def test_voice_alias_must_lead_to_a_voice():
    """An alias to a voice that does not exist was accepted and reached the model as an unknown voice."""
    declared = pipeline(stage("a", makes="audio"), voices=Voices(names=("heart",), aliases={"alloy": "hart"}))
    expected = "pipeline 'p': voices.aliases.alloy: unknown voice 'hart'; did you mean 'heart'? known: heart"
    assert declared.problems() == [expected]


def test_one_source_feeds_a_stage_by_one_edge():
    """Streams are filed by source: a second edge from the same stage silently took the first one's place."""
    declared = pipeline(stage("a"), stage("b", edge("a"), edge("a", processor="pkg.processors:other"), makes="text"))
    assert declared.problems() == [
        "pipeline 'p', stage 'b', inputs[1].source: 'a' feeds this stage already by inputs[0]"
    ]


def test_request_edges_may_be_several():
    declared = pipeline(stage("a", edge(), edge(parts=("speech_text",)), makes="audio"))
    assert declared.problems() == []


def test_topological_order_is_by_data_flow():
    declared = pipeline(stage("c", edge("b"), makes="text"), stage("b", edge("a")), stage("a"))
    assert [s.name for s in declared.topological()] == ["a", "b", "c"]


def test_edges_of_a_stage():
    both = stage("b", edge("a"), edge())
    assert [e.source for e in both.stage_edges()] == ["a"]
    assert [e.source for e in both.request_edges()] == ["request"]


def test_output_kinds_in_declared_order():
    declared = pipeline(stage("a", makes="transcript"), stage("b", edge("a"), makes="text"))
    assert declared.output_kinds() == ("transcript", "text")


def test_unknown_stage_is_a_key_error():
    with pytest.raises(KeyError, match="talker"):
        pipeline(stage("a", makes="text")).stage("talker")


def test_frozen():
    declared = load_pipeline("ramp")
    with pytest.raises(ValidationError, match="frozen"):
        declared.stages[0].name = "other"
    with pytest.raises(ValidationError, match="frozen"):
        declared.name = "other"


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (Edge, {"source": "a", "processor": "x:y", "schema": 1}),
        (
            StagePipelineConfig,
            {"name": "a", "execution_type": "llm_ar", "model_arch": "A", "inputs": (edge(),), "gpus": 1},
        ),
        (PipelineConfig, {"name": "p", "description": "x", "stages": (stage("a"),), "edges": ()}),
        (Voices, {"voice": "a"}),
        (StageLimits, {"max_num_seq": 1}),
    ],
)
def test_unknown_fields_are_refused(model, given):
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        model.model_validate(given)


@pytest.mark.parametrize("name", ["Thinker", "0", "a-b", "", "a b"])
def test_names_fit_every_place_they_are_used_in(name: str):
    """A stage's name is also a deployment's name, a YAML key and a metric label."""
    with pytest.raises(ValidationError, match="name"):
        stage(name)


def test_stages_and_inputs_are_never_empty():
    with pytest.raises(ValidationError, match="stages"):
        PipelineConfig(name="p", description="x", stages=())
    with pytest.raises(ValidationError, match="inputs"):
        StagePipelineConfig(name="a", execution_type=StageExecutionType.LLM_AR, model_arch="A", inputs=())
