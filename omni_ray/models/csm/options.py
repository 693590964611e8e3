"""Extra request fields of ``csm``. No heavy imports."""

from omni_ray.engine.reference_voice import REFERENCE_FIELDS
from omni_ray.registry import ModelExtras

EXTRAS = ModelExtras(fields=REFERENCE_FIELDS)
