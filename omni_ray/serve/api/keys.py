"""API keys: who may ask."""

import hashlib
import hmac
import os
import re
from collections.abc import Mapping

from omni_ray.config.base import suggest
from omni_ray.config.ingress import IngressConfig
from omni_ray.errors import AuthenticationError, ConfigError

ANONYMOUS = ""
"""The name of whoever presents no key where none is asked for."""

_NAMED = re.compile(r"([A-Za-z][A-Za-z0-9_.\-]{0,63}):(.+)", re.DOTALL)


class ApiKeys:
    """Checks ``Authorization: Bearer``. Without configured keys every header is accepted and ignored.

    Only digests are kept and compared, each in constant time and all of them always: neither how much of a key is
    right, nor its length, nor its place in the list shows in the time that a refusal takes.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        """Take the keys, by name."""
        self._digests = {name: _digest(key.encode("utf-8", "surrogateescape")) for name, key in keys.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The keys' names."""
        return tuple(self._digests)

    def check(self, token: str | None) -> str:
        """The name of the key the client presented, or ``ANONYMOUS`` where none is asked for.

        Raises:
            AuthenticationError: missing or unknown.
        """
        if not self._digests:
            return ANONYMOUS
        if not token:
            raise AuthenticationError("an API key is required: send 'Authorization: Bearer KEY'")
        presented = _digest(token.encode("latin-1", "replace"))  # a header's bytes, as they came
        found = [name for name, known in self._digests.items() if hmac.compare_digest(presented, known)]
        if not found:
            raise AuthenticationError("the API key is unknown")
        return found[0]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_api_keys(config: IngressConfig) -> dict[str, str]:
    """The API keys in the environment variable that ``ingress.api_keys_env`` names.

    They are separated by commas, each as ``name:key`` or as a key alone, which is then called ``key1``, ``key2``...

    Raises:
        ConfigError: the variable is named but empty (a typo there would open the service to everybody), a name or a key
            comes twice, or limits are set for a name that is not there. No message repeats a key.
    """
    variable = config.api_keys_env
    if variable is None:
        return {}
    where = f"ingress.api_keys_env: environment variable {variable!r}"
    given = [item.strip() for item in os.environ.get(variable, "").split(",") if item.strip()]
    if not given:
        raise ConfigError([f"{where} is empty or not set on this node"])
    keys: dict[str, str] = {}
    for place, item in enumerate(given, 1):
        named = _NAMED.fullmatch(item)
        name, key = (named[1], named[2].strip()) if named else (f"key{place}", item)
        if name in keys or key in keys.values():
            raise ConfigError([f"{where} holds a name or a key twice: number {place}, {name!r}"])
        keys[name] = key
    unknown = [name for name in config.key_limits_of if name not in keys]
    if unknown:
        raise ConfigError(
            [f"ingress.key_limits_of: {name!r} is no key's name; {suggest(name, keys)}" for name in unknown]
        )
    return keys
