"""One protection of ``protections.py``: how it is taken out, and the test that must notice."""

from dataclasses import dataclass
from typing import Literal

ENGINE, SERVE, API = "omni_ray/engine/", "omni_ray/serve/", "omni_ray/serve/api/"
TEST_API, TEST_ENGINE, TEST_SERVE = "tests/serve/api/test_api_", "tests/engine/test_", "tests/serve/test_"
NO_RAY = ("tests/serve/api/", "tests/engine/", "tests/serve/test_lifeline", "tests/serve/test_records", "tests/test_")


@dataclass(frozen=True, slots=True)
class Removal:
    """``old``, which stands once in ``file``, becomes ``new``; then ``test`` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str

    @property
    def group(self) -> Literal["cluster", "no cluster"]:
        """Whether the test starts Ray."""
        return "no cluster" if self.test.startswith(NO_RAY) else "cluster"
