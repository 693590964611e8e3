"""Extra request fields of ``ToneTalker``."""

from pydantic import Field

from omni_ray.config.base import StrictModel
from omni_ray.registry import ModelExtras


class Tone(StrictModel):
    """The request field ``tone``; ``base_hz`` is the tone of the letter a."""

    base_hz: float = Field(default=220, ge=50, le=2000)


EXTRAS = ModelExtras(fields={"tone": Tone})
