"""``omni-ray-haproxy`` as Serve starts it, on Serve's own config, before servers that die or are read slowly."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from ray.serve._private import haproxy as serves
from ray.serve.config import HTTPOptions

from omni_ray.errors import ConfigError, ReplicaDiedError
from omni_ray.serve.api.errors import error_body
from omni_ray.serve.haproxy import BINARY, BUFFER_BYTES, SETTINGS, amended, check_host
from omni_ray.serve.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import asyncio, socket, sys

async def talk(reader, writer):
    while True:
        head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode()
        size = int(head.lower().partition("content-length:")[2].split("\\r\\n")[0] or 0)
        body = await reader.readexactly(size)
        path = head.split()[1]
        if path != "/-/healthz":
            print("has", path, flush=True)
        if path == "/late":
            await asyncio.sleep(1)
        if path in ("/late", "/-/healthz"):
            answer = f"{sum(body)} {sys.argv[1]}".encode()
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(answer) + answer)
        else:
            writer.write(b"HTTP/1.1 200 OK\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n3\\r\\nabc\\r\\n")
            sent = 0
            while path == "/sound":
                writer.write(b"1000\\r\\n" + bytes(4096) + b"\\r\\n")
                try:
                    async with asyncio.timeout(1):
                        await writer.drain()
                except TimeoutError:
                    print("braked", sent, flush=True)
                    return
                sent += 4096
            await asyncio.sleep(60)

async def main():
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**17)  # else the kernel's largest is what it holds by itself
    raw.bind(("127.0.0.1", int(sys.argv[1])))
    async with await asyncio.start_server(talk, sock=raw):
        print("up", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@asynccontextmanager
async def server(port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(port), stdout=asyncio.subprocess.PIPE
    )
    try:
        await line(process, "up")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line(process: asyncio.subprocess.Process, begins: str) -> str:
    """What the process prints next, which must begin so."""
    assert process.stdout is not None
    said = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
    assert said.startswith(begins), said
    return said


@pytest.fixture
def command(tmp_path: Path) -> str:
    """What pip makes of the entry in pyproject.toml."""
    path = tmp_path / "omni-ray-haproxy"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from omni_ray.serve.haproxy import main\nmain()\n"
    )
    path.chmod(0o755)
    return str(path)


@asynccontextmanager
async def balanced(folder: Path, ports: list[int]) -> AsyncIterator[str]:
    """Serve's HAProxy with our settings before servers on ``ports``; yields its URL."""
    port = free_port()
    config = serves.HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        socket_path=f"{folder}/admin.sock",
        server_state_base=str(folder),
        server_state_file=f"{folder}/state",
        stats_port=free_port(),
        metrics_port=free_port(),
        metrics_enabled=False,
        retry_on=SETTINGS["RAY_SERVE_HAPROXY_RETRY_ON"],
        retries=int(SETTINGS["RAY_SERVE_HAPROXY_RETRIES"]),
        observe_error_limit=int(SETTINGS["RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT"]),
        bufsize=int(SETTINGS["RAY_SERVE_HAPROXY_TUNE_BUFSIZE"]),
    )
    servers = [serves.ServerConfig(f"s{p}", "127.0.0.1", p) for p in ports]
    backend = serves.BackendConfig(name="app", path_prefix="/", app_name="app", servers=servers)
    api = serves.HAProxyApi(config, {"app": backend} if ports else {}, config_file_path=f"{folder}/haproxy.cfg")
    await api.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await api.stop()


async def test_a_replica_that_dies_and_a_reader_that_stalls(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that showed nothing is answered by another replica; what cannot be is told, as an OpenAI error.

    And no more than the buffers' size lies between a server and a client that reads nothing.
    """
    monkeypatch.setattr(serves, BINARY, command)
    ports = [free_port(), free_port()]
    async with AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(server(port)) for port in ports]
        url = await stack.enter_async_context(balanced(tmp_path, ports))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))

        with socket.socket() as stalls:
            stalls.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalls.connect(("127.0.0.1", httpx.URL(url).port))
            stalls.sendall(b"GET /sound HTTP/1.1\r\nhost: x\r\n\r\n")
            has = [asyncio.create_task(line(process, "has /sound")) for process in processes]
            (first,), (other,) = await asyncio.wait(has, return_when=asyncio.FIRST_COMPLETED)
            other.cancel()
            braked = await line(processes[has.index(first)], "braked")
            assert int(braked.split()[1]) < 8 * BUFFER_BYTES

        asked = asyncio.create_task(client.post("/late", content=bytes([1]) * 40_000))
        has = [asyncio.create_task(line(process, "has /late")) for process in processes]
        (first,), (other,) = await asyncio.wait(has, return_when=asyncio.FIRST_COMPLETED)
        died = has.index(first)
        processes[died].kill()
        answer = await asked
        assert (answer.status_code, answer.text) == (200, f"40000 {ports[1 - died]}")
        await other

        async with client.stream("GET", "/begun") as begun:
            sound = begun.aiter_bytes()
            assert await anext(sound) == b"abc"
            os.kill(processes[1 - died].pid, signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(sound)
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=url, timeout=60) as another:
            told = await another.post("/late", content=b"x")
        assert time.monotonic() - began < 20
        assert (told.status_code, told.headers["retry-after"]) == (503, "1")
        assert told.json() == error_body(ReplicaDiedError("the server process that worked on this request is gone"))


async def test_what_haproxy_says_itself(tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an application, as at the start; nobody else may command it."""
    monkeypatch.setattr(serves, BINARY, command)
    async with balanced(tmp_path, []) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.get("/v1/models")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        error = ReplicaDiedError("no application is served here: it starts, or has been stopped")
        assert answer.json() == error_body(error)
    assert (tmp_path / "admin.sock").stat().st_mode & 0o077 == 0


def test_another_form_of_serves_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unset RAY_SERVE_HAPROXY_BINARY_PATH"):
        amended("global\n", tmp_path)


def test_a_host_where_haproxy_would_find_no_replica_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--host 10\.0\.0\.1: in HAProxy mode it must be one of 127\.0\.0\.1, "):
        check_host("10.0.0.1")
    check_host("0.0.0.0")


def test_few_open_files_are_few_connections() -> None:
    """HAProxy wanted 10276 files for 4096 connections, and where it may not have them it did not start."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024)); from pathlib import Path;"
        "from omni_ray.serve.haproxy import settings_here;"
        "print(settings_here(Path('/tmp/x'), 1)['RAY_SERVE_HAPROXY_MAXCONN'])"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert 2.5 * int(said) < 1024 - 200
