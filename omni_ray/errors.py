"""Every error omni_ray raises on purpose, with the HTTP status and OpenAI error type it becomes.

Which error belongs to which part of a request's way:

    client --InvalidRequestError, NotFoundError, PayloadTooLargeError--> ingress
    ingress --SaturatedError, RateLimitedError--> client      (a bounded queue or a key's limit: nothing was started)
    stage --StageFailedError, StageTimeoutError, ReplicaDiedError, SchemaMismatchError--> ingress
    deploy YAML, pipeline declaration --ConfigError--> operator, before any actor starts

Only the ingress renders errors; everywhere else they are raised and travel up the chain of generators. Errors cross
process borders, so every class keeps its whole state in ``args`` (the pickle protocol of exceptions).
"""

from collections.abc import Sequence


class OmniRayError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        status: HTTP status the ingress answers with when nothing was sent yet.
        error_type: OpenAI's ``error.type``.
        message: what happened, for the client; never a stack trace.
        param: the request field at fault, or None.
    """

    status = 500
    error_type = "server_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class InvalidRequestError(OmniRayError):
    """The client's request cannot be honoured; ``param`` names the field."""

    status = 400
    error_type = "invalid_request_error"


class PayloadTooLargeError(InvalidRequestError):
    """The body or a media part exceeds a configured limit."""

    status = 413


class BodyTimeoutError(InvalidRequestError):
    """The request's body came too slowly, or stopped coming."""

    status = 408
    error_type = "timeout_error"


class SlowReaderError(InvalidRequestError):
    """The client stopped to read its answer. It never sees this: its connection is closed."""

    status = 408
    error_type = "timeout_error"


class NotFoundError(InvalidRequestError):
    """The model, route or voice resource does not exist."""

    status = 404


class AuthenticationError(InvalidRequestError):
    """The API key is missing or unknown."""

    status = 401
    error_type = "authentication_error"


class SaturatedError(OmniRayError):
    """A bounded queue is full. The request was not started; ``retry_after_s`` says when to come back."""

    status = 503
    error_type = "overloaded_error"

    def __init__(self, message: str, param: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message, param)
        self.args = (message, param, retry_after_s)
        self.retry_after_s = retry_after_s


class RateLimitedError(SaturatedError):
    """The API key has reached a limit of its own; the server may have room for others."""

    status = 429
    error_type = "rate_limit_error"


class NotReadyError(SaturatedError):
    """The application is starting or a required stage has no healthy replica."""


class StageFailedError(OmniRayError):
    """A stage raised while it computed this request. The traceback is in the stage's log, never in the answer."""


class ReplicaDiedError(StageFailedError):
    """The replica that computed this request is gone. The one error after which the ingress may try again.

    Attributes:
        stage: whose replica it was; empty if none is known to have died.
    """

    status = 503

    def __init__(self, message: str, param: str | None = None, stage: str = "") -> None:
        super().__init__(message, param)
        self.args = (message, param, stage)
        self.stage = stage


class EngineDiedError(ReplicaDiedError):
    """What an engine computes with (a child process, its thread) is gone, so every request in its replica is lost.

    It never leaves the stage called ``stage``: the replica ends its process, which all its consumers notice at once.
    """


class TakeoverRefusedError(StageFailedError):
    """A replica died in mid-stream and no other one may go on with the request."""

    status = 503


class StageTimeoutError(StageFailedError):
    """A stage sent nothing for longer than its deadline."""

    status = 504
    error_type = "timeout_error"


class StageSilentError(StageTimeoutError):
    """A stage that had begun to answer fell silent: it hangs, or its node is gone and nobody said so.

    The ingress may try elsewhere, once.
    """


class SchemaMismatchError(StageFailedError):
    """Two replicas speak different versions of an edge's schema (a roll-out is under way)."""

    status = 503


class TruncatedError(StageFailedError):
    """The answer reached a limit before its end, in a form that cannot say so."""


class NonFiniteAudioError(StageFailedError):
    """A stage produced NaN or infinite samples; sending them would be silence or a loud click."""


class ConfigError(OmniRayError):
    """A declaration or deploy config is wrong. Carries every problem found, not only the first.

    Attributes:
        problems: one sentence each; every one names the file or object, the key, and the nearest known name.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(f"- {p}" for p in problems))
        self.args = (tuple(problems),)
        self.problems = tuple(problems)
