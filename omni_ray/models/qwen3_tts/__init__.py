"""Qwen3-TTS with named voices, computed by its own package ``qwen-tts``: text to 24 kHz speech, in one piece."""
