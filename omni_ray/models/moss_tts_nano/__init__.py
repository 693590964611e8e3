"""MOSS-TTS-Nano: one stage, text to 48 kHz speech, computed by the code inside its checkpoint."""
