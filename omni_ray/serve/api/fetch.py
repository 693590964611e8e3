"""Media by URL, from the hosts that the deploy config allows: one checked address per request, redirects checked anew.

An omni server stands inside a cluster, next to dashboards and metadata services that trust whoever can reach them
(C06). So a host must be on the allow-list, none of its addresses may be private, and the connection goes to the address
that was checked: a second DNS answer, given to the connect, would not be the one that was looked at.
"""

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import httpx

from omni_ray.config.ingress import MediaUrlConfig
from omni_ray.errors import InvalidRequestError, PayloadTooLargeError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

_PORTS: Final = {"http": 80, "https": 443}
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_PLATFORM: Final = frozenset({ipaddress.ip_address("168.63.129.16")})
"""Global by its number, yet it is Azure's own service inside every virtual machine."""


def is_public(address: Address) -> bool:
    """Whether an address leads out to the internet: no private, loopback, link-local, shared or reserved range.

    Addresses that carry another one (IPv4 in IPv6, 6to4, Teredo, NAT64) are as good as what they carry.
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved and address not in _PLATFORM


class _SystemResolver:
    """All addresses of a host, by the system's resolver, which also reads numbers such as ``0x7f.1``.

    On threads of its own: a name server that does not answer holds each for many seconds, and the process's others
    encode live streams.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="dns")

    async def __call__(self, host: str, port: int) -> list[str]:
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        return [str(item[4][0]).partition("%")[0] for item in found]


class MediaFetcher:
    """Fetches media for requests; keeps nothing between two of them, no cookie and no connection."""

    def __init__(
        self,
        config: MediaUrlConfig,
        resolve: Resolve | None = None,
        may_connect: Callable[[Address], bool] = is_public,
    ) -> None:
        """Take the allow-list.

        Args:
            config: ``ingress.media_urls``.
            resolve: host and port to addresses; None is the system's.
            may_connect: the rule for addresses.
        """
        self._config = config
        self._resolve = resolve or _SystemResolver()
        self._may_connect = may_connect
        self._tls = ssl.create_default_context() if config.allow else None
        # httpx writes whole URLs into its log, and a signed URL's query is a secret.
        logging.getLogger("httpx").setLevel(logging.WARNING)

    async def fetch(self, url: str, *, param: str, max_bytes: int, count: Callable[[int], None]) -> bytes:
        """The bytes behind ``url``.

        Args:
            url: http or https, as the allow-list says.
            param: the request field, for the errors. The URL itself is never repeated.
            max_bytes: most bytes that are read.
            count: called with the size of each piece; may raise.

        Raises:
            InvalidRequestError: not allowed, not found, or not there within ``timeout_s``.
            PayloadTooLargeError: more than ``max_bytes``.
        """
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await self._follow(url, param, max_bytes, count)
        except TimeoutError:
            limit = self._config.timeout_s
            raise InvalidRequestError(f"{param}: was not there within {limit:g} s", param) from None

    async def _follow(self, url: str, param: str, max_bytes: int, count: Callable[[int], None]) -> bytes:
        try:
            target = httpx.URL(url)
            for _ in range(self._config.max_redirects + 1):
                answer = await self._once(target, param, max_bytes, count)
                if isinstance(answer, bytes):
                    return answer
                target = target.join(answer)
        except (httpx.InvalidURL, UnicodeError) as error:
            raise InvalidRequestError(f"{param}: is not a valid URL", param) from error
        except (httpx.HTTPError, OSError) as error:
            raise InvalidRequestError(f"{param}: could not be fetched", param) from error
        raise InvalidRequestError(f"{param}: redirects more than {self._config.max_redirects} times", param)

    async def _once(
        self, url: httpx.URL, param: str, max_bytes: int, count: Callable[[int], None]
    ) -> bytes | httpx.URL | str:
        """One request: the body, or where it redirects to."""
        if not self._config.allows(url.scheme, _host(url), url.port) or url.userinfo:
            raise InvalidRequestError(f"{param}: its host is not on this server's list of allowed hosts", param)
        address = await self._checked_address(url, param)
        # Identity: a compressed body may hold a thousand times its size.
        headers = {"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity", "User-Agent": "omni_ray"}
        extensions = {"sni_hostname": _host(url)} if url.scheme == "https" else {}
        async with (
            httpx.AsyncClient(verify=self._tls or True, trust_env=False, timeout=self._config.timeout_s) as client,
            client.stream(
                "GET", url.copy_with(host=address, fragment=None), headers=headers, extensions=extensions
            ) as response,
        ):
            if response.status_code in _REDIRECTS and "location" in response.headers:
                return str(response.headers["location"])
            if response.status_code != 200 or response.headers.get("content-encoding", "identity") != "identity":
                raise InvalidRequestError(f"{param}: its host answered {response.status_code}", param)
            return await self._body(response, param, max_bytes, count)

    async def _checked_address(self, url: httpx.URL, param: str) -> str:
        """The address to connect to. One forbidden answer among several spoils them all."""
        found = await self._resolve(_host(url), url.port or _PORTS[url.scheme])
        addresses = [ipaddress.ip_address(text) for text in found]
        if not addresses or not all(map(self._may_connect, addresses)):
            raise InvalidRequestError(f"{param}: its host has no public address", param)
        return str(addresses[0])

    async def _body(self, response: httpx.Response, param: str, max_bytes: int, count: Callable[[int], None]) -> bytes:
        too_large = PayloadTooLargeError(f"'{param}' exceeds the limit of {max_bytes / 2**20:.4g} MB", param)
        declared = response.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > max_bytes:
            raise too_large
        body = bytearray()
        async for piece in response.aiter_raw():
            if len(body) + len(piece) > max_bytes:
                raise too_large
            count(len(piece))
            body += piece
        return bytes(body)


def _host(url: httpx.URL) -> str:
    """The host as DNS knows it, and the allow-list: in ASCII."""
    return url.raw_host.decode("ascii")
