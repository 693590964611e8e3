"""Serve's own total timeout of requests, which cuts speech that is longer: the ingress says so when it starts (C36)."""

import asyncio
import logging
from typing import Final

from ray.serve.context import _get_global_client

logger = logging.getLogger("ray.serve")

ASK_TIMEOUT_S: Final = 10.0


async def warn_of_total_timeout(max_audio_seconds: float) -> None:
    """Log a warning if Serve's HTTP proxy ends requests before the longest answer is spoken.

    Only ``request_timeout_s`` of Serve's ``http_options`` is looked at; a client may set one of its own by header.
    """
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            limit = await asyncio.to_thread(_request_timeout_s)
    except TimeoutError:
        logger.warning("Serve's controller did not tell its http_options within %g s", ASK_TIMEOUT_S)
        return
    if limit is not None and 0 < limit < max_audio_seconds:
        logger.warning(
            "Serve's http_options.request_timeout_s is %g s, but one answer may speak for %g s here: longer speech "
            "will be cut. Leave it out: streams that fall silent are ended by ingress.idle_timeout_s.",
            limit,
            max_audio_seconds,
        )


def _request_timeout_s() -> float | None:
    """Blocks while the controller answers; there is no public call for it."""
    limit: float | None = _get_global_client().http_config.request_timeout_s
    return limit
