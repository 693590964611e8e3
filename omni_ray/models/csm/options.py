"""Engine options and extra request fields of ``csm``. No heavy imports: a deploy YAML is checked against them."""

from pydantic import Field

from omni_ray.engine.options import CodecOptions
from omni_ray.engine.reference_voice import REFERENCE_FIELDS
from omni_ray.registry import ModelExtras

EXTRAS = ModelExtras(fields=REFERENCE_FIELDS)


class MimiOptions(CodecOptions):
    """Options of ``CsmCode2Wav``.

    Attributes:
        max_num_seqs: streams that are open at once, as many as the talkers that feed this replica compute. Each holds
            some 8 MB at the published shape.
        batch_rows: the most requests decoded in one batch.
    """

    max_num_seqs: int = Field(default=64, ge=1)
    batch_rows: int = Field(default=16, ge=1)
