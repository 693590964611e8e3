"""The autoscaling policy alone: what replicas say of themselves, and how many replicas that makes."""

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingContext

from omni_ray.serve.autoscaling import StageAutoscaling
from omni_ray.serve.effort import MEMORY_S, Effort
from omni_ray.serve.slack import AT_EASE_S, Report, SlackPolicy, Tuning, load_of, replicas_wanted

IDLE = Report(busy=0, queued=0, places=8, oldest_wait_s=0, least_lead_s=AT_EASE_S, cost=0)


def wanted(*reports: Report, target: int | None = None, running: int | None = None) -> int:
    alive = len(reports) if running is None else running
    return replicas_wanted(reports, alive, alive if target is None else target, Tuning())


@pytest.mark.parametrize(
    ("report", "load"),
    [
        (IDLE, 0),
        (IDLE._replace(busy=4), 0.5),
        (IDLE._replace(busy=8, queued=4, oldest_wait_s=0.2), 1.5),
        (IDLE._replace(busy=4, cost=0.3), 1.2),  # four streams, each second of sound takes 0.3 s
        (IDLE._replace(busy=1, least_lead_s=0.2), 1),
        (IDLE._replace(busy=1, least_lead_s=0.3), 0.125),
        (IDLE._replace(busy=7, queued=1, oldest_wait_s=3), 1),  # priority 1 waits although a place is free
        (IDLE._replace(busy=4, cost=0.5, least_lead_s=-3), 2),
    ],
)
def test_load_of_a_replica(report: Report, load: float) -> None:
    assert load_of(report, Tuning()) == pytest.approx(load)


def test_ongoing_requests_do_not_matter() -> None:
    """A codec that is open for 500 streams, with 1 in work and all listeners at ease, keeps its one replica."""
    context = a_context({"talker#a": IDLE._replace(busy=1, places=64, cost=0.05)}, requests=500)
    assert SlackPolicy()(context)[0] == 1


def test_more_before_anyone_hears_a_gap() -> None:
    """Leads are all fine, but another stream would not fit: 7 of 8 places, or 85 % of the time."""
    assert wanted(IDLE._replace(busy=7)) == 2
    assert wanted(IDLE._replace(busy=5, places=64, cost=0.17)) == 2
    assert wanted(IDLE._replace(busy=6)) == 1


def test_a_late_listener_wants_one_more_and_not_every_second_another() -> None:
    """Streams never move: an old replica stays late beside a new one that is empty, which is enough."""
    late = IDLE._replace(busy=2, least_lead_s=-5)
    assert wanted(late) == 2
    assert wanted(late, IDLE) == 2
    assert wanted(late, IDLE._replace(busy=4)) == 2
    assert wanted(late, late) == 3


def test_a_step_down_is_not_taken_back_at_once() -> None:
    """At 1.5 of 0.8 two are needed. At 0.78 one would do, but barely: nothing is taken away. At 0.69 it is."""
    share = IDLE._replace(places=1000)
    assert wanted(share._replace(busy=750), share._replace(busy=750)) == 2
    assert wanted(share._replace(busy=390), share._replace(busy=390)) == 2
    assert wanted(share._replace(busy=345), share._replace(busy=345)) == 1
    assert wanted(IDLE, IDLE, IDLE) == 1


def test_silent_replicas_are_not_taken_for_idle() -> None:
    assert wanted(running=3) == 3
    assert wanted(IDLE, running=3) == 3
    assert wanted(IDLE._replace(busy=8), IDLE._replace(busy=8), IDLE._replace(busy=8), running=4) == 4
    assert wanted(IDLE, target=4, running=1) == 1


def a_context(reports: dict[str, Report], requests: float = 0) -> AutoscalingContext:
    """As Serve's controller makes it: each value a time series, the last point is now."""
    deployment = DeploymentID("talker", "ramp")
    series: dict[str, dict[ReplicaID, Any]] = {name: {} for name in Report._fields}
    for name, report in reports.items():
        for field, value in report._asdict().items():
            points = [TimeStampedValue(1.0, 999.0), TimeStampedValue(2.0, value)]
            series[field][ReplicaID(name, deployment)] = points
    count = len(reports)
    return AutoscalingContext(
        deployment, "talker", "ramp", count, count, [], requests, 0, {}, series, 1, 8, {}, None, None, 2.0, None
    )


def test_a_replica_without_a_whole_report_is_left_out() -> None:
    context = a_context({"a": IDLE, "b": IDLE._replace(busy=8, queued=8)})
    assert SlackPolicy()(context)[0] == 3
    assert context.raw_metrics is not None
    context.raw_metrics["cost"].pop(ReplicaID("a", DeploymentID("talker", "ramp")))
    context.current_num_replicas = context.target_num_replicas = 4
    assert SlackPolicy()(context)[0] == 4


def test_the_policy_needs_nothing_of_ours_where_it_runs(tmp_path: Any) -> None:
    """Serve pickles it by value; a controller without omni_ray can unpickle and call it."""
    definition = StageAutoscaling(max_replicas=4).serve().policy.get_serialized_policy_def()
    (tmp_path / "policy").write_bytes(definition)
    (tmp_path / "reports").write_bytes(pickle.dumps(IDLE._replace(busy=8)._asdict()))
    code = """if True:
        import pickle, sys
        from types import SimpleNamespace
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "omni_ray":
                    raise ImportError(name)
        sys.meta_path.insert(0, Absent())
        policy = pickle.load(open("policy", "rb"))(target_load=0.5)
        report = pickle.load(open("reports", "rb"))
        raw = {name: {"r": [SimpleNamespace(value=value)]} for name, value in report.items()}
        print(policy(SimpleNamespace(raw_metrics=raw, current_num_replicas=1, target_num_replicas=1)))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("(2, {})\n", "")


class TestEffort:
    """Seconds of work for a second of sound."""

    @pytest.fixture
    def clock(self) -> SimpleNamespace:
        return SimpleNamespace(now=100.0)

    @pytest.fixture
    def effort(self, clock: SimpleNamespace) -> Effort:
        return Effort(lambda: clock.now)

    def test_what_is_computed_together_is_counted_once(self, effort: Effort, clock: SimpleNamespace) -> None:
        """Two streams of real time, worked on at the same time for a quarter of it."""
        for _ in range(200):
            effort.works("a")
            effort.works("b")
            clock.now += 0.02
            effort.rests("a")
            effort.rests("b")
            effort.sounded(0.08)
            effort.sounded(0.08)
            clock.now += 0.06
        assert effort.cost() == pytest.approx(0.125, rel=0.02)

    def test_waiting_for_upstream_costs_nothing(self, effort: Effort, clock: SimpleNamespace) -> None:
        effort.works("a")
        clock.now += 1
        effort.sounded(1)
        effort.rests("a")
        before = effort.cost()
        clock.now += 20
        assert effort.cost() == pytest.approx(before)
        assert not effort.at_work("a")

    def test_it_follows_what_is_now(self, effort: Effort, clock: SimpleNamespace) -> None:
        """Half as much sound for the same work: most of the change shows after twice ``MEMORY_S``."""
        effort.works("a")
        for seconds, cost in ((10.0, 0.1), (5.0, 0.18)):
            for _ in range(int(MEMORY_S * 20)):
                clock.now += 0.1
                effort.sounded(0.1 * seconds)
            assert effort.cost() == pytest.approx(cost, rel=0.03)

    def test_no_sound_no_cost(self, effort: Effort, clock: SimpleNamespace) -> None:
        effort.works("a")
        clock.now += 5
        assert effort.cost() == 0
