"""OpenBMB's VoxCPM2, computed by its own package ``voxcpm``: text to 48 kHz speech, in a recording's voice if given."""
