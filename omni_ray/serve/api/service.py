"""What every route works with, and the checks all of them share."""

import contextlib
import secrets
import time
import unicodedata
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_ray.config.pipeline import OutputKind, RequestPart
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.types import Clip, ImagePrompt, Message, Request
from omni_ray.errors import InvalidRequestError, NotFoundError
from omni_ray.serve.api.errors import shown
from omni_ray.serve.api.fetch import MediaFetcher
from omni_ray.serve.api.gate import Gate
from omni_ray.serve.api.incoming import MB, Bodies
from omni_ray.serve.api.keys import ApiKeys
from omni_ray.serve.api.priority import CHAT
from omni_ray.serve.api.request_log import RequestInfo
from omni_ray.serve.api.shares import Shares
from omni_ray.serve.api.silence import watched
from omni_ray.serve.dispatcher import Dispatcher
from omni_ray.serve.events import OutputEvent
from omni_ray.serve.planner import Plan

MAX_SEED = 2**63 - 1
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Service:
    """One application's HTTP side."""

    dispatcher: Dispatcher
    keys: ApiKeys
    gate: Gate
    bodies: Bodies
    fetcher: MediaFetcher
    shares: Shares = field(default_factory=Shares)
    created: int = field(default_factory=lambda: int(time.time()))

    def admit(self, info: RequestInfo, priority: int) -> None:
        """Takes a place in the server until the request is over; before its body is read (C59).

        The last eighth of the places is kept for chat, where the pipeline takes messages.

        Args:
            info: the request's.
            priority: the route's.

        Raises:
            RateLimitedError: the request's API key has reached a limit of its own.
            SaturatedError: there is no place.
        """
        kept = self.dispatcher.config.max_concurrent_requests // 8 if priority > CHAT and self.takes_messages() else 0
        with contextlib.ExitStack() as taken:
            taken.enter_context(self.dispatcher.admitted(kept))
            taken.enter_context(self.gate.passed(info.api_key))
            info.served_s = taken.enter_context(self.shares.share(info.api_key, lambda: info.audio_seconds))
            info.held.push(taken.pop_all())

    @property
    def max_answer_bytes(self) -> int:
        """Of encoded sound or pictures."""
        return int(self.dispatcher.config.max_answer_mb * MB)

    def stream(
        self, request: Request, plan: Plan, info: RequestInfo, clips: Sequence[Clip] = ()
    ) -> AsyncGenerator[OutputEvent, None]:
        """The request's events; ``StageTimeoutError`` if a kind of output falls silent."""
        events = self.dispatcher.stream(request, plan, clips, info.traceparent, info.waited_s)
        return watched(events, plan, self.dispatcher.config.idle_timeout_s)

    def takes_messages(self) -> bool:
        """Whether the pipeline has a chat route."""
        stages = self.dispatcher.pipeline.stages
        return any("messages" in edge.parts for stage in stages for edge in stage.inputs)

    def check_model(self, model: str) -> None:
        """``NotFoundError`` for every id but the served one."""
        if model != self.dispatcher.model_name:
            raise NotFoundError(f"model {shown(model)} does not exist; served: {self.dispatcher.model_name}", "model")

    def route_plan(self, output: OutputKind, part: RequestPart) -> Plan:
        """The plan of a route that always makes ``output`` from ``part``.

        Raises:
            NotFoundError: the pipeline cannot, so this route does not exist here.
        """
        try:
            return self.dispatcher.plan({output}, {part})
        except InvalidRequestError as error:
            raise NotFoundError(f"this model has no such route: {error.message}") from error

    def new_request(
        self,
        info: RequestInfo,
        *,
        seed: int | None,
        priority: int,
        extras: dict[str, Any],
        sampling: SamplingParams,
        messages: tuple[Message, ...] = (),
        speech_text: str | None = None,
        image_prompt: ImagePrompt | None = None,
        voice: str | None = None,
        speed: float = 1.0,
        language: str | None = None,
    ) -> Request:
        """The request as stages see it; a missing seed is drawn here (C38)."""
        return Request(
            request_id=info.request_id,
            seed=secrets.randbelow(MAX_SEED + 1) if seed is None else seed,
            priority=priority,
            served_s=info.served_s,
            messages=messages,
            speech_text=speech_text,
            image_prompt=image_prompt,
            voice=voice,
            speed=speed,
            language=language,
            sampling=sampling,
            max_audio_seconds=self.dispatcher.max_audio_seconds,
            extras=extras,
        )


def is_blank(text: str) -> bool:
    """Whether there is nothing to say: only blanks, controls and invisible characters (C47)."""
    return all(unicodedata.category(char) in ("Zs", "Zl", "Zp", "Cc", "Cf") for char in text)
