"""An out-of-tree model: every letter of the text becomes a tone."""

from omni_ray.registry import OmniModelRegistry, register_extras, register_pipeline


def register() -> None:
    """Called by omni_ray in every process, through the entry point in ``pyproject.toml``. Imports nothing heavy."""
    register_pipeline("tone_tts", "tone_tts.pipeline:PIPELINE")
    OmniModelRegistry.register("ToneTalker", "tone_tts.model:ToneTalker")
    register_extras("ToneTalker", "tone_tts.extras:EXTRAS")
