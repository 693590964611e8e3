"""How many replicas a stage wants, from what its replicas know of themselves; never from ongoing requests.

A chain of generators holds a slot in every stage for as long as anybody listens, so counting those would scale stages
that have nothing to do. What counts is whether a listener will run out of sound because of this stage.

Ray Serve pickles this module by value into its controller, which may not have omni_ray: it imports no other of ours.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ray.serve.config import AutoscalingContext

AT_EASE_S = 60.0
"""The lead that a replica reports while nobody waits for it."""
STEADY = 1.15
"""So much more than what there is to do must fit the replicas that are left after a step down."""


class Report(NamedTuple):
    """What one replica says of itself.

    Attributes:
        busy, queued, places: requests computed and waiting, and how many can be computed at once.
        oldest_wait_s: longest wait of a request still queued.
        least_lead_s: of the streams that wait for this stage, and not for what comes before it, and have sounded for a
            while: the least lead; ``AT_EASE_S`` if there is none.
        cost: seconds of work for one second of sound, all its streams together; 0 where no sound is made or known of.
    """

    busy: float
    queued: float
    places: float
    oldest_wait_s: float
    least_lead_s: float
    cost: float


class Tuning(NamedTuple):
    """When a replica has enough to do.

    Attributes:
        target_load: the part of a replica's places, and of its time, that is to be in use.
        slack_s: with a lead below this, a listener is about to hear a gap.
        wait_s: a request that is queued for longer presses.
    """

    target_load: float = 0.8
    slack_s: float = 0.25
    wait_s: float = 1.0


def load_of(report: Report, tuning: Tuning) -> float:
    """What a replica has to do, as a part of what it can.

    The greater of two: requests per place, and the seconds of work that its streams need in each second if all are to
    sound without a gap. A replica with a listener about to hear a gap, or with a queue that stands, is full, whatever
    these say.
    """
    requests = report.busy + report.queued
    pressed = report.least_lead_s < tuning.slack_s or report.oldest_wait_s > tuning.wait_s
    return max(requests / report.places, requests * report.cost, 1.0 if pressed else 0.0)


def most_loaded(reports: Sequence[Report], tuning: Tuning) -> Report:
    """What a replica says that runs several stages: the report of the one that has most to do."""
    return max(reports, key=lambda report: load_of(report, tuning))


def replicas_wanted(reports: Sequence[Report], running: int, target: int, tuning: Tuning) -> int:
    """Replicas that hold all of the load at ``target_load``; at least one.

    Loads are added, so a replica that is new and empty changes nothing: streams never move, and an old replica stays
    full until its streams end. Nothing is taken away that would be wanted back at once, nor while a replica is silent.

    Args:
        reports: of the replicas that have reported.
        running: replicas that run.
        target: replicas that were last wanted.
        tuning: when a replica has enough to do.
    """
    if not reports:
        return target
    load = sum(load_of(report, tuning) for report in reports) / tuning.target_load
    wanted = max(1, math.ceil(load - 1e-9))
    if wanted >= target:
        return wanted
    if len(reports) < running:
        return target
    return min(target, max(1, math.ceil(load * STEADY - 1e-9)))


class SlackPolicy:
    """The policy that Ray Serve calls in its controller, several times a second."""

    def __init__(self, **tuning: float) -> None:
        self._tuning = Tuning(**tuning)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Replicas wanted; Serve applies delays and bounds to it."""
        reports = latest(context.raw_metrics or {})
        running, target = context.current_num_replicas, context.target_num_replicas
        return replicas_wanted(reports, running, target, self._tuning), {}


def latest(series: Mapping[str, Mapping[Any, Sequence[Any]]]) -> list[Report]:
    """The last report of every replica that has made a whole one; Serve keeps a time series of each value."""
    known = [series.get(name, {}) for name in Report._fields]
    replicas = [replica for replica in known[0] if all(part.get(replica) for part in known)]
    return [Report(*(part[replica][-1].value for part in known)) for replica in replicas]
