"""voice_chat: small real models from pip packages in a cascade; speech or text in, text and speech out, on CPU."""
