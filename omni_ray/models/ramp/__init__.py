"""ramp: a three-stage pipeline without weights whose every sample says whose it is. The template for a new model."""
