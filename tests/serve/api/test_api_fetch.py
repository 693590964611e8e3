"""Media by URL (C06): what may be reached, what may not, and what a hostile host can do. Real sockets, no mocks.

The file host of the tests listens on 127.0.0.2, the thing to be protected on 127.0.0.1. Both are loopback, so the rule
for addresses is replaced by "only 127.0.0.2" where something is to be fetched at all; the real rule has its own test.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from api_fakes import FakeDispatcher, check_error, client_of, text, wav

from omni_ray.config.ingress import IngressConfig, MediaUrlConfig
from omni_ray.errors import InvalidRequestError, OmniRayError, PayloadTooLargeError
from omni_ray.serve.api.fetch import MediaFetcher, is_public

CHAT = "/v1/chat/completions"
GOOD, PROTECTED = "127.0.0.2", "127.0.0.1"
DNS = {"files.test": [GOOD], "evil.test": [PROTECTED], "mixed.test": [GOOD, PROTECTED], "a.cdn.test": [GOOD]}

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, str], Awaitable[None]]


class Host:
    """A tiny HTTP/1.1 server that counts what reaches it."""

    def __init__(self, answers: Mapping[str, bytes | Handler]) -> None:
        self.answers = answers
        self.heads: list[str] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.heads.append(head)
            answer = self.answers[head.split(" ")[1]]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(reader, writer, head)


@contextlib.asynccontextmanager
async def listening(address: str, answers: Mapping[str, bytes | Handler], port: int = 0) -> AsyncIterator[Host]:
    host = Host(answers)
    server = await asyncio.start_server(host.serve, address, port)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()


def ok(body: bytes, *headers: str) -> bytes:
    head = "\r\n".join(["HTTP/1.1 200 OK", f"content-length: {len(body)}", "connection: close", *headers])
    return head.encode() + b"\r\n\r\n" + body


def redirect(location: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()


async def names(host: str, port: int) -> Sequence[str]:
    return DNS[host]


def only_good(address: Any) -> bool:
    return str(address) == GOOD


def fetcher(port: int, *more: str, resolve: Any = names, **config: Any) -> MediaFetcher:
    allow = (f"http://files.test:{port}", f"http://*.cdn.test:{port}", *more)
    return MediaFetcher(MediaUrlConfig(allow=allow, **config), resolve, only_good)


async def get(fetch: MediaFetcher, url: str, max_bytes: int = 10_000) -> bytes:
    return await fetch.fetch(url, param="p", max_bytes=max_bytes, count=lambda size: None)


async def refused(fetch: MediaFetcher, url: str, **kwargs: Any) -> OmniRayError:
    with pytest.raises(InvalidRequestError) as caught:
        await get(fetch, url, **kwargs)
    assert caught.value.param == "p"
    assert "secret" not in caught.value.message
    return caught.value


async def test_what_is_allowed_is_fetched_from_the_checked_address() -> None:
    """The address is resolved once, so an answer that changes afterwards changes nothing; the host's name is kept."""
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return [GOOD] if len(asked) == 1 else [PROTECTED]

    async with listening(GOOD, {"/a?b=c": ok(b"sound")}) as host:
        assert await get(fetcher(host.port, resolve=rebinding), f"http://files.test:{host.port}/a?b=c#x") == b"sound"
        assert await get(fetcher(host.port), f"http://A.CDN.test:{host.port}/a?b=c") == b"sound"
        idn = fetcher(host.port, f"http://xn--mnchen-3ya.test:{host.port}", resolve=rebinding)
        asked.clear()
        for name in ("xn--mnchen-3ya.test", "m\u00fcnchen.test"):
            assert await get(idn, f"http://{name}:{host.port}/a?b=c") == b"sound"
            assert asked.pop() == "xn--mnchen-3ya.test"
        await get(fetcher(host.port, resolve=rebinding), f"http://files.test:{host.port}/a?b=c")
    assert asked == ["files.test"]
    assert f"\r\nhost: files.test:{host.port}\r\n" in host.heads[0].lower()
    assert "\r\naccept-encoding: identity\r\n" in host.heads[0].lower()
    assert "cookie" not in host.heads[0].lower()


async def test_a_name_server_that_does_not_answer_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lookup holds a thread; the process's own threads encode live streams."""
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: answer.wait(10) and [])
    fetch = MediaFetcher(MediaUrlConfig(allow=("files.test",), timeout_s=0.2))
    asked = [asyncio.create_task(refused(fetch, "https://files.test/a")) for _ in range(40)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(9):
        assert await asyncio.to_thread(lambda: "encoded") == "encoded"
        await asyncio.gather(*asked)
    answer.set()


async def test_a_name_that_leads_inside_is_refused_before_anything_is_sent() -> None:
    async with listening(PROTECTED, {"/api/version": ok(b"{}")}) as dashboard:
        port = dashboard.port
        allow = [f"http://{host}:{port}" for host in ("evil.test", "mixed.test", PROTECTED, "[::1]", "0x7f.1")]
        fetch = fetcher(port, *allow)
        for name in ("evil.test", "mixed.test"):
            error = await refused(fetch, f"http://{name}:{port}/api/version?secret=1")
            assert "no public address" in error.message
        real = MediaFetcher(MediaUrlConfig(allow=tuple(allow)))  # the system's resolver, the real rule
        for name in (PROTECTED, "[::1]", "0x7f.1"):
            error = await refused(real, f"http://{name}:{port}/api/version?secret=1")
            assert "no public address" in error.message
        assert dashboard.heads == []


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test:{port}/a?secret=1",
        "https://files.test:{port}/a",
        "http://files.test/a",
        "http://files.test.evil.test:{port}/a",
        "http://cdn.test:{port}/a",
        "http://xcdn.test:{port}/a",
        "http://files.test:{port}@evil.test/a",
        "http://user:secret@files.test:{port}/a",
        "http://evil.test\\@files.test:{port}/a",
        "http://evil.test#@files.test:{port}/a",
        "http://files.test:{port}0/a",
        "ftp://files.test/a",
        "file:///etc/passwd",
        "/etc/passwd",
        "http:///etc/passwd",
        "http://files.test:{port}/a\r\nX-Evil: 1",
        "http://[::1/a",
        "http://\udcff/a",
        "http://files.test:99999999/a",
        "http://" + "a." * 200 + "test/a",
    ],
)
async def test_what_is_not_on_the_list_is_not_touched(url: str) -> None:
    async with listening(GOOD, {}) as host:
        await refused(fetcher(host.port), url.format(port=host.port) if "{port}" in url else url)
        assert host.heads == []


@pytest.mark.parametrize(
    "to",
    [
        "http://evil.test:{port}/x",
        "http://169.254.169.254/latest",
        "//127.0.0.1:{port}/x",
        "file:///etc/passwd",
        "gopher://files.test/x",
        "https://files.test:{port}/x",
    ],
)
async def test_a_redirect_is_checked_like_the_first_url(to: str) -> None:
    async with (
        listening(PROTECTED, {"/x": ok(b"inside")}) as inside,
        listening(GOOD, {}, inside.port) as host,
    ):
        host.answers = {"/a": redirect(to.format(port=host.port))}
        await refused(fetcher(host.port, f"http://evil.test:{host.port}"), f"http://files.test:{host.port}/a")
        assert len(host.heads) == 1
        assert inside.heads == []


async def test_redirects_within_the_list_are_followed_and_counted() -> None:
    async with listening(GOOD, {}) as host:
        host.answers = {
            "/1": redirect("/2"),
            "/2": redirect(f"http://a.cdn.test:{host.port}/3"),
            "/3": redirect("4"),
            "/4": ok(b"sound"),
            "/loop": redirect("/loop"),
        }
        assert await get(fetcher(host.port), f"http://files.test:{host.port}/1") == b"sound"
        error = await refused(fetcher(host.port), f"http://files.test:{host.port}/loop")
        assert "more than 3 times" in error.message
        await refused(fetcher(host.port, max_redirects=0), f"http://files.test:{host.port}/1")


async def test_bytes_are_capped_declared_or_not() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        while True:
            writer.write(bytes(65_536))
            await writer.drain()

    declared = ok(b"").replace(b"length: 0", b"length: 1000000000000000")
    packed = ok(b"x", "content-encoding: gzip")
    async with listening(GOOD, {"/e": endless, "/d": declared, "/z": packed, "/full": ok(bytes(10_000))}) as host:
        base = f"http://files.test:{host.port}"
        assert len(await get(fetcher(host.port), f"{base}/full")) == 10_000
        for path in ("/e", "/d"):
            with pytest.raises(PayloadTooLargeError):
                await get(fetcher(host.port), base + path)
        await refused(fetcher(host.port), f"{base}/z")


async def test_time_is_capped_however_it_is_spent() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str) -> None:
        await reader.read()

    async def slow_names(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(60)
        return [GOOD]

    async with listening(GOOD, {"/drip": drip, "/silent": silent}) as host:
        for path, resolve in (("/drip", names), ("/silent", names), ("/drip", slow_names)):
            fetch = fetcher(host.port, timeout_s=0.2, resolve=resolve)
            error = await refused(fetch, f"http://files.test:{host.port}{path}")
            assert "within 0.2 s" in error.message


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", b"\x00\xff garbage\r\n\r\n", b""]
)
async def test_a_host_that_does_not_answer_properly(answer: bytes) -> None:
    async with listening(GOOD, {"/a": answer}) as host:
        await refused(fetcher(host.port), f"http://files.test:{host.port}/a?secret=1")
    await refused(fetcher(host.port), f"http://files.test:{host.port}/a?secret=1")  # nobody listens


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200", "0.0.0.0",
        "168.63.129.16", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::", "::1", "fe80::1",
        "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::", "2001:db8::1", "2001:0:0:0:0:0:80ff:fffe",
    ],
)  # fmt: skip
def test_addresses_that_lead_inside(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["93.184.216.34", "1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1"])
def test_addresses_that_lead_out(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


# --- through the API ---


def question(kind: str, url: str) -> dict[str, Any]:
    part = {"type": kind, kind: {"data" if kind == "input_audio" else "url": url}}
    return {"model": "m", "messages": [{"role": "user", "content": [part]}]}


async def test_a_clip_by_url_is_heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """From the body to the stages; with logging at its most talkative, no URL is in the log."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(MediaFetcher.__init__, "__defaults__", (names, only_good))
    clip = wav(np.full(1600, 0.5, np.float32))
    async with listening(GOOD, {"/a.wav?secret=1": ok(clip)}) as host:
        media_urls = MediaUrlConfig(allow=(f"http://files.test:{host.port}",))
        fake = FakeDispatcher(script=text("heard"), config=IngressConfig(media_urls=media_urls))
        async with client_of(fake) as client:
            for kind in ("audio_url", "input_audio"):
                body = question(kind, f"http://files.test:{host.port}/a.wav?secret=1")
                assert (await client.post(CHAT, json=body)).status_code == 200
            body = question("audio_url", f"http://evil.test:{host.port}/a.wav?secret=1")
            check_error(await client.post(CHAT, json=body), 400, "messages[0].content[0].audio_url.url")
    for (heard,) in fake.clips:
        assert len(heard.samples) == 1600
        assert abs(float(heard.samples.mean()) - 0.5) < 1e-3
    assert "secret" not in "".join(record.getMessage() for record in caplog.records if record.name != "httpcore")


async def test_what_was_fetched_counts_as_the_requests_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen URLs of 40 MB each are no way around the limit on a body."""
    monkeypatch.setattr(MediaFetcher.__init__, "__defaults__", (names, only_good))
    clip = wav(np.zeros(200_000, np.float32))
    async with listening(GOOD, {"/a": ok(clip)}) as host:
        config = IngressConfig(max_body_mb=1, media_urls=MediaUrlConfig(allow=(f"http://files.test:{host.port}",)))
        fake = FakeDispatcher(script=text("heard"), config=config)
        part = {"type": "audio_url", "audio_url": {"url": f"http://files.test:{host.port}/a"}}
        async with client_of(fake) as client:
            for parts, status in ((2, 200), (3, 413)):
                body = {"model": "m", "messages": [{"role": "user", "content": [part] * parts}]}
                assert (await client.post(CHAT, json=body)).status_code == status
    assert len(fake.clips[0]) == 2


@pytest.mark.parametrize("kind", ["audio_url", "image_url", "input_audio"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:8265/api/version", "file:///etc/passwd", "/etc/passwd", "ftp://x/a"])
async def test_without_a_list_nothing_is_fetched(kind: str, url: str) -> None:
    fake = FakeDispatcher(script=text("x"))
    async with client_of(fake) as client:
        field = "data" if kind == "input_audio" else "url"
        response = await client.post(CHAT, json=question(kind, url))
        check_error(response, 400, f"messages[0].content[0].{kind}.{field}")
    assert fake.requests == []


@pytest.mark.parametrize(
    "entry", ["", "*", "http://", "https://a.test/path", "a b", "*.", "user@a.test", "ftp://a.test"]
)
def test_an_entry_that_is_no_host(entry: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        MediaUrlConfig(allow=(entry,))
