"""Which code computes a stage: a digest of this package's sources, of the stage's own classes and of its settings."""

import hashlib
import inspect
from pathlib import Path

import omni_ray
from omni_ray.serve.specs import StageSpec


def code_version(spec: StageSpec, *classes: type) -> str:
    """Equal exactly where a request may go on that another replica began.

    Args:
        spec: what the stage is built from. Weights count by their name only, options that only wait not at all.
        classes: engine and model class, which may come from another package.
    """
    digest = hashlib.sha256()
    package = Path(omni_ray.__file__).parent
    files = {*package.rglob("*.py"), *(Path(inspect.getfile(cls)) for cls in classes)}
    for path in sorted(files):
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes())
    options = spec.engine_options.model_dump_json(exclude=set(spec.engine_options.waits))
    settings = (spec.pipeline.model_dump_json(), options, spec.sampling.model_dump_json())
    digest.update("\0".join((str(spec.model), spec.load_format, *settings)).encode())
    return digest.hexdigest()[:16]
