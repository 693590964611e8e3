"""Which changes of a stage end the takeover of requests that the old one began."""

from typing import Any

import pytest

from omni_ray.engine.per_request import PerRequestEngine
from omni_ray.serve.resolve import AppArgs, resolve
from omni_ray.serve.version import code_version


def version(**engine: Any) -> str:
    app = resolve("ramp", AppArgs(deploy_config={"stages": {"talker": {"engine": engine}}}))
    return code_version(next(spec for spec in app.stages if spec.stage == "talker"), PerRequestEngine)


@pytest.mark.parametrize(
    ("engine", "same"),
    [
        ({"pace_ms": 7, "stall_s": 4, "max_queue": 3, "queue_timeout_s": 9, "reserved_seqs": 1}, True),
        ({"frames_per_token": 4}, False),
        ({"max_num_seqs": 3}, False),  # with fixed shapes it is in every sample
    ],
)
def test_only_waits_may_differ(engine: dict[str, Any], same: bool) -> None:
    """A redeploy that only changed how long a stage waits ended every stream that a death hit after it (chaos run)."""
    assert (version(**engine) == version()) is same
