"""omni_ray: omni-modality models as Ray Serve deployment graphs."""

__version__ = "0.1.0"
