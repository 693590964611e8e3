"""Ports for what is started beside Ray; imports no Ray."""

import socket
from contextlib import suppress
from random import SystemRandom


def free_port() -> int:
    """One that nobody listens on now.

    Above those of Ray's workers (10002 to 19999), and below those that the kernel gives to whoever asks for any, as
    Ray's other processes do: else one of them may take it first. Seeded ``random`` stays as it is.
    """
    while True:
        port = SystemRandom().randrange(20_000, 29_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
