"""Which lines a replica writes: not that it was asked again whether it lives, and does."""

import logging
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from omni_ray.serve.api.request_log import RequestLog
from omni_ray.serve.logs import LOGGER, log_as


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def kept() -> Iterator[_Kept]:
    serve, ours, handler = logging.getLogger(LOGGER), logging.getLogger("omni_ray"), _Kept()
    levels, propagates = (serve.level, ours.level), ours.propagate
    serve.addHandler(handler)
    serve.setLevel(logging.INFO)
    log_as("ramp", "talker")
    yield handler
    for logger, level in zip((serve, ours), levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)
    ours.propagate = propagates


def test_serves_lines_of_successful_probes_are_not_written(kept: _Kept) -> None:
    """Their texts are Ray Serve's ``access_log_msg``."""
    told = ["CALL ping ERROR 3.0ms", "GET /ready 503 2.1ms", "GET /readyz 200 2.1ms", "CALL run OK 3.0ms"]
    for line in ("CALL ping OK 0.9ms", "GET /ready 200 2.1ms", "GET /health 200 0.4ms", *told):
        logging.getLogger(LOGGER).info(line)
    logging.getLogger(LOGGER).warning("CALL ping OK is no warning")
    assert kept.lines == [*told, "CALL ping OK is no warning"]


def test_our_line_of_a_probe_is_written_if_it_failed(kept: _Kept) -> None:
    statuses = iter((200, 503))
    routes = [Route("/ready", lambda request: PlainTextResponse("", next(statuses)))]
    client = TestClient(RequestLog(Starlette(routes=routes), lambda route, outcome, seconds: None))
    assert [client.get("/ready").status_code for _ in range(2)] == [200, 503]
    (line,) = kept.lines
    assert "GET /ready status=503" in line
