"""Our OpenAPI document against our server, by schemathesis: what it says is so, and nothing a client sends is a 500.

A short run here; ``FUZZ=2000 pytest tests/serve/api/test_api_schema.py`` for a long one.
"""

import os
from typing import Any

import schemathesis
from api_fakes import FULL, FakeDispatcher, app_of, audio, text, transcript
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    status_code_conformance,
    unsupported_method,
)

RUNS = int(os.environ.get("FUZZ", "15"))
FAKE = FakeDispatcher(FULL, [*transcript("x"), *text("one"), *audio(480)])
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", app_of(FAKE, "k"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    negative_data_rejection,
    unsupported_method,
    ignored_auth,
]


@SCHEMA.parametrize()
@settings(
    max_examples=RUNS,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_the_document_and_the_server_agree(case: Any) -> None:
    response = case.call(headers={"Authorization": "Bearer k"})
    case.validate_response(response, checks=CHECKS, headers={"Authorization": "Bearer k"})
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == response.status_code
    assert FAKE.open == FAKE.active == 0
