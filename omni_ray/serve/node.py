"""The Ray node that this process runs on."""

import ray

from omni_ray.serve.lifeline import LifelineHost


def lifeline_host() -> LifelineHost:
    """A host of lifelines for streams that this process consumes."""
    node = ray.get_runtime_context().get_node_id()
    raylet_port = next(known["NodeManagerPort"] for known in ray.nodes() if known["NodeID"] == node)
    return LifelineHost(ray.util.get_node_ip_address(), raylet_port)
