"""Our OpenAPI document against our server, by schemathesis: what it says is so, and nothing a client sends is a 500.

A short run here; ``FUZZ=2000 pytest tests/serve/api/test_api_schema.py`` for a long one.
"""

import os
from typing import Any

import numpy as np
import schemathesis
from api_fakes import FULL, PAINTER, FakeDispatcher, app_of, audio, text, transcript
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    status_code_conformance,
    unsupported_method,
)

from omni_ray.engine.types import Finish, ImageChunk, Output
from omni_ray.serve.api.field_notes import NOTES
from omni_ray.serve.events import OutputEvent

RUNS = int(os.environ.get("FUZZ", "15"))
FAKE = FakeDispatcher(FULL, [*transcript("x"), *text("one"), *audio(480)])
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", app_of(FAKE, "k"))
PAINTED: list[Output] = [ImageChunk(0, np.zeros((2, 3, 3), np.uint8), 0, 2), Finish()]
PAINTER_FAKE = FakeDispatcher(PAINTER, [OutputEvent("painter", output) for output in PAINTED])
PAINTER_SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", app_of(PAINTER_FAKE, "k"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    negative_data_rejection,
    unsupported_method,
    ignored_auth,
]


SHORT = settings(
    max_examples=RUNS,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@SCHEMA.parametrize()
@SHORT
def test_the_document_and_the_server_agree(case: Any) -> None:
    check(case, FAKE)


@PAINTER_SCHEMA.include(path_regex="images").parametrize()
@SHORT
def test_they_agree_where_there_are_pictures(case: Any) -> None:
    check(case, PAINTER_FAKE)


def test_every_field_and_answer_says_what_it_is() -> None:
    """A model's own extra field says it in its model's docstring."""
    described = set()
    for operation in (o for path in app_of(FAKE).openapi()["paths"].values() for o in path.values()):
        assert operation["description"]
        assert operation["responses"]["200"]["description"] == "the answer"
        for content in operation.get("requestBody", {"content": {}})["content"].values():
            for name, field in content["schema"]["properties"].items():
                assert any("description" in said for said in (field, *field.get("anyOf", ()))), (operation, name)
                described.add(name)
    assert set(NOTES) <= described, "notes of fields that no route has"


def check(case: Any, fake: FakeDispatcher) -> None:
    response = case.call(headers={"Authorization": "Bearer k"})
    case.validate_response(response, checks=CHECKS, headers={"Authorization": "Bearer k"})
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == response.status_code
    assert fake.open == fake.active == 0
