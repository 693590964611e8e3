"""``omni-ray bench``: measures any OpenAI-like speech server from outside. A client: no server code, no Ray."""
