"""The planner: the smallest sub-graph for a request, walked as one tree of streams."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_ray.config.pipeline import Edge, PipelineConfig, StagePipelineConfig
from omni_ray.errors import ConfigError, InvalidRequestError
from omni_ray.registry import OMNI_PIPELINES, load_pipeline
from omni_ray.serve.planner import Plan, all_plans, feeding_edge, make_plan


def edge(source: str, *parts: str, refs: bool = False) -> Edge:
    return Edge.model_validate({"source": source, "processor": "p:q", "parts": parts, "carries_refs": refs})


def stage(name: str, *inputs: Edge, makes: str | None = None, **changes: object) -> StagePipelineConfig:
    given: dict[str, object] = {
        "name": name,
        "execution_type": "llm_ar",
        "model_arch": "A",
        "inputs": inputs,
        "final_output_type": makes,
    }
    return StagePipelineConfig.model_validate(given | changes)


def pipeline(*stages: StagePipelineConfig) -> PipelineConfig:
    declared = PipelineConfig(name="p", description="x", stages=stages)
    assert declared.problems() == []
    return declared


SPEECH = pipeline(
    stage("listener", edge("request", "input_audio"), makes="transcript"),
    stage("thinker", edge("listener", "messages"), edge("request", "messages"), makes="text", owns_tokenizer=True),
    stage("talker", edge("thinker"), edge("request", "speech_text")),
    stage("code2wav", edge("talker", refs=True), makes="audio", execution_type="llm_generation"),
)
"""Shaped like voice_chat."""


class TestSpeech:
    """Every kind of request to a listener -> thinker -> talker -> code2wav pipeline."""

    @pytest.mark.parametrize(
        ("outputs", "parts", "names", "trunk", "sampled"),
        [
            (["text"], ["messages"], ["thinker"], "thinker", "thinker"),
            (["text", "audio"], ["messages"], ["thinker", "talker", "code2wav"], "code2wav", "thinker"),
            (["audio"], ["messages"], ["thinker", "talker", "code2wav"], "code2wav", "thinker"),
            (["text"], ["messages", "input_audio"], ["listener", "thinker"], "thinker", "thinker"),
            (
                ["text", "audio"], ["messages", "input_audio"],
                ["listener", "thinker", "talker", "code2wav"], "code2wav", "thinker",
            ),
            (["audio"], ["speech_text"], ["talker", "code2wav"], "code2wav", "talker"),
            (["transcript"], ["input_audio"], ["listener"], "listener", "listener"),
            (["transcript", "text"], ["messages", "input_audio"], ["listener", "thinker"], "thinker", "thinker"),
        ],
    )  # fmt: skip
    def test_smallest_sub_graph(self, outputs, parts, names, trunk, sampled):
        plan = make_plan(SPEECH, outputs, parts)
        assert (list(plan.names()), plan.trunk, plan.sampled) == (names, trunk, sampled)
        assert {kind for kind, _ in plan.outputs} == set(outputs)
        assert_walks(SPEECH, plan)

    @pytest.mark.parametrize("swapped", [False, True])
    def test_fewest_stages_win(self, swapped: bool):
        """Both ways read the messages; the one without the rewriter is enough, in whatever order they are declared."""
        ways = [edge("rewriter"), edge("request", "messages")]
        declared = pipeline(
            stage("rewriter", edge("request", "messages")),
            stage("thinker", *(reversed(ways) if swapped else ways), makes="text"),
        )
        assert make_plan(declared, ["text"], ["messages"]).names() == ("thinker",)

    def test_order_of_arguments_does_not_matter(self):
        plans = {
            make_plan(SPEECH, outputs, parts)
            for outputs in itertools.permutations(["text", "audio"])
            for parts in itertools.permutations(["messages", "input_audio"])
        }
        assert len(plans) == 1

    def test_refs_travel_only_where_an_edge_carries_them(self):
        plan = make_plan(SPEECH, ["text", "audio"], ["messages"])
        assert {part.name: part.by_reference for part in plan.stages} == {
            "thinker": False, "talker": True, "code2wav": False,
        }  # fmt: skip

    def test_inner_outputs_stop_where_they_are_consumed(self):
        """The talker's latents feed code2wav and must not ride along to the ingress."""
        plan = make_plan(SPEECH, ["text", "audio"], ["messages"])
        assert plan.stage("talker").feeds == {"talker"}
        assert plan.stage("code2wav").feeds == frozenset()

    def test_request_edge_replaces_the_stage_edge(self):
        plan = make_plan(SPEECH, ["audio"], ["speech_text"])
        talker = SPEECH.stage("talker")
        assert feeding_edge(talker, plan.stage("talker"), "request") == talker.inputs[1]
        assert feeding_edge(talker, plan.stage("talker"), "thinker") is None

    @pytest.mark.parametrize(
        ("outputs", "parts", "message"),
        [
            (["transcript"], ["messages"], "pipeline p cannot make transcript from messages"),
            (["text"], ["speech_text"], "pipeline p cannot make text from speech_text"),
            (["audio", "text"], ["speech_text"], "pipeline p cannot make audio and text from speech_text"),
            (["audio"], ["speech_text", "messages"], "pipeline p cannot make audio from messages and speech_text"),
            (["text"], [], "pipeline p cannot make text from nothing"),
        ],
    )
    def test_impossible_requests(self, outputs, parts, message):
        """A part that nothing would read is refused too: silently dropping a user's audio is worse than a 400."""
        with pytest.raises(InvalidRequestError) as caught:
            make_plan(SPEECH, outputs, parts)
        assert str(caught.value) == message
        assert caught.value.status == 400

    def test_unknown_output_names_what_there_is(self):
        with pytest.raises(InvalidRequestError) as caught:
            make_plan(load_pipeline("ramp"), ["transcript"], ["messages"])
        assert str(caught.value) == "pipeline ramp makes no transcript; it makes: text, audio"
        assert caught.value.param == "modalities"


@pytest.mark.parametrize("name", sorted(OMNI_PIPELINES))
def test_registered_pipelines_can_be_walked(name: str):
    declared = load_pipeline(name)
    plans = all_plans(declared)
    assert plans
    for plan in plans:
        assert_walks(declared, plan)


class TestBranches:
    """Graphs that are no chains: one stream per edge, one trunk, no second call to a running request."""

    def test_diamond(self):
        declared = pipeline(
            stage("a", edge("request", "messages")),
            stage("b", edge("a")),
            stage("c", edge("a")),
            stage("d", edge("b"), edge("c"), makes="audio"),
        )
        plan = make_plan(declared, ["audio"], ["messages"])
        assert [(p.name, p.calls) for p in plan.stages] == [("a", ()), ("b", ("a",)), ("c", ("b",)), ("d", ("c",))]
        assert plan.stage("b").feeds == {"a", "b"}, "c reads a through b"
        assert_walks(declared, plan)

    def test_fan_out_to_two_outputs_is_one_trunk(self):
        """Disjoint ends would need two streams; a stage that both feed joins them, and one without is refused."""
        declared = pipeline(
            stage("a", edge("request", "messages"), makes="text"),
            stage("b", edge("a")),
            stage("c", edge("a"), edge("b"), makes="audio"),
        )
        plan = make_plan(declared, ["text", "audio"], ["messages"])
        assert plan.trunk == "c"
        assert_walks(declared, plan)

    def test_refs_pass_through_stages_that_do_not_read_them(self):
        """c reads a's latents through b's stream, which so must be one that may carry refs."""
        declared = pipeline(
            stage("a", edge("request", "messages")),
            stage("b", edge("a")),
            stage("c", edge("a", refs=True), edge("b"), makes="audio"),
        )
        plan = make_plan(declared, ["audio"], ["messages"])
        assert {part.name for part in plan.stages if part.by_reference} == {"a", "b"}

    def test_second_reader_of_a_source_that_sends_refs(self):
        """b takes a's refs, c reads the same outputs through b: its stream went over gRPC, where nested refs leak."""
        declared = pipeline(
            stage("a", edge("request", "messages"), makes="text"),
            stage("b", edge("a", refs=True), makes="audio"),
            stage("c", edge("a"), makes="transcript"),
        )
        plan = make_plan(declared, ["text", "audio", "transcript"], ["messages"])
        assert {part.name: part.by_reference for part in plan.stages} == {"a": True, "b": True, "c": False}

    def test_two_branches_from_the_request_join(self):
        declared = pipeline(
            stage("encoder", edge("request", "input_audio")),
            stage("reader", edge("request", "messages")),
            stage("thinker", edge("encoder"), edge("reader"), makes="text"),
        )
        plan = make_plan(declared, ["text"], ["input_audio", "messages"])
        assert plan.stage("thinker").calls == ("encoder", "reader")
        assert_walks(declared, plan)

    def test_stages_in_any_declared_order(self):
        declared = pipeline(*reversed(SPEECH.stages))
        plan = make_plan(declared, ["text", "audio"], ["messages", "input_audio"])
        assert plan.names() == ("listener", "thinker", "talker", "code2wav")


class TestRefusedAtRegistration:
    """``all_plans`` says at build time what could not be served at run time."""

    def test_disjoint_outputs(self):
        declared = pipeline(
            stage("a", edge("request", "messages"), makes="text"),
            stage("b", edge("request", "messages"), makes="audio"),
        )
        with pytest.raises(ConfigError) as caught:
            all_plans(declared)
        assert caught.value.problems == (
            "pipeline 'p': no request leads to text and audio in one stream; every stage must be reachable from a "
            "request edge, and one trunk must carry every output",
        )

    def test_disjoint_outputs_that_only_a_third_joins(self):
        """All three together could be served, so it was accepted; asking for two of them was then a 400."""
        declared = pipeline(
            stage("a", edge("request", "messages"), makes="text"),
            stage("b", edge("request", "messages"), makes="audio"),
            stage("c", edge("a"), edge("b"), makes="transcript"),
        )
        with pytest.raises(ConfigError, match="text and audio in one stream"):
            all_plans(declared)

    def test_an_output_that_no_request_reaches(self):
        declared = PipelineConfig(
            name="p",
            description="x",
            stages=(
                stage("a", edge("request", "messages"), makes="text"),
                stage("b", edge("c"), makes="audio"),
                stage("c", edge("b")),
            ),
        )
        assert declared.problems() == ["pipeline 'p': cycle among stages b, c"]


def assert_walks(declared: PipelineConfig, plan: Plan) -> None:
    """The rules every plan keeps.

    Each stage but the trunk is called exactly once; from the trunk the calls reach all; whoever consumes a source gets
    it through one of its calls, and every stage on the way passes it on; outputs reach the trunk.
    """
    names = plan.names()
    called = Counter(c for part in plan.stages for c in part.calls)
    assert called == Counter(n for n in names if n != plan.trunk)
    below = reachable(plan)
    assert below[plan.trunk] == set(names)
    for i, part in enumerate(plan.stages):
        assert set(part.calls) <= set(names[:i]), "data flows in order"
        sources = [declared.stage(part.name).inputs[j].source for j in part.edges]
        assert sources
        assert len({s == "request" for s in sources}) == 1, "one request edge, or stage edges"
        if sources != ["request"]:
            assert sources == [e.source for e in declared.stage(part.name).stage_edges()]
        for source in sources:
            if source == "request":
                continue
            carriers = [c for c in part.calls if source in below[c]]
            assert len(carriers) == 1
            for hop in path(plan, carriers[0], source):
                assert source in plan.stage(hop).feeds, f"{hop} must pass {source} on to {part.name}"
    for part in plan.stages:
        assert part.feeds <= below[part.name]
    assert all(maker in below[plan.trunk] for _, maker in plan.outputs)


def reachable(plan: Plan) -> dict[str, set[str]]:
    below: dict[str, set[str]] = {}
    for part in plan.stages:
        below[part.name] = {part.name}.union(*(below[c] for c in part.calls))
    return below


def path(plan: Plan, start: str, end: str) -> list[str]:
    """Stages from ``start`` upstream to ``end``, both included."""
    if start == end:
        return [start]
    below = reachable(plan)
    through = next(c for c in plan.stage(start).calls if end in below[c])
    return [start, *path(plan, through, end)]


@st.composite
def small_dags(draw: st.DrawFn) -> PipelineConfig:
    """Up to six stages; every stage reads some earlier ones, the request, or has both as alternatives."""
    count = draw(st.integers(1, 6))
    names = [f"s{i}" for i in range(count)]
    stages = []
    kinds = draw(st.permutations(["text", "audio", "transcript"]))
    makers = dict(zip(draw(st.permutations(names)), kinds[: draw(st.integers(1, 3))], strict=False))
    for i, name in enumerate(names):
        sources = draw(st.lists(st.sampled_from(names[:i]), unique=True, max_size=3)) if i else []
        inputs = [edge(s, refs=draw(st.booleans())) for s in sources]
        if not inputs or draw(st.booleans()):
            parts = draw(st.lists(st.sampled_from(["messages", "input_audio", "speech_text"]), min_size=1, unique=True))
            inputs.append(edge("request", *parts))
        stages.append(stage(name, *inputs, makes=makers.get(name)))
    return pipeline(*draw(st.permutations(stages)))


@settings(max_examples=150, deadline=None)
@given(small_dags())
def test_every_plan_of_every_small_graph_walks(declared: PipelineConfig):
    kinds = declared.output_kinds()
    for n in range(1, len(kinds) + 1):
        for outputs in itertools.combinations(kinds, n):
            for parts in ({"messages"}, {"messages", "input_audio"}, {"messages", "input_audio", "speech_text"}):
                try:
                    plan = make_plan(declared, outputs, parts)
                except InvalidRequestError:
                    continue
                assert_walks(declared, plan)
                assert tuple(kind for kind, _ in plan.outputs) == outputs
                used = [declared.stage(p.name).inputs[i] for p in plan.stages for i in p.edges]
                assert {part for e in used for part in e.parts} == parts, "every supplied part is read"
                consumed = {e.source for e in used} | {maker for _, maker in plan.outputs}
                assert set(plan.names()) <= consumed, "no stage runs for nothing"
                for part in plan.stages:
                    carried = {e.source for e in used if e.carries_refs}
                    assert part.by_reference or not (part.feeds & carried), "refs only on streams that may carry them"
