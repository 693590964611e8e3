"""Engine options of ``any_thinker`` on the torch engine. No heavy imports: a deploy YAML is checked against them."""

from omni_ray.engine.options import AROptions


class AnyThinkerOptions(AROptions):
    """Options of ``AnyThinker``.

    Attributes:
        trust_remote_code: run the Python files inside the checkpoint. Whoever can write the checkpoint then runs code
            in the replica.
    """

    trust_remote_code: bool = False
