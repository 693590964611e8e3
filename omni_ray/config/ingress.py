"""The ``ingress:`` block of a deploy config: limits, keys and what the HTTP side may do for a client."""

import re
from typing import Any, Final, Self

from pydantic import Field, field_validator, model_validator

from omni_ray.config.base import StrictModel
from omni_ray.config.pipeline import OutputKind, PipelineConfig

GRACE_MARGIN_S: Final = 30
"""What a leaving replica, or HAProxy's past configuration, has beyond the longest speech to finish its streams."""

_ORIGIN = re.compile(r"https?://[a-z0-9.\-\[\]:]+")
_MEDIA_ORIGIN = re.compile(r"(?:(https?)://)?((?:\*\.)?[a-z0-9_\-.\[\]:]*?[a-z0-9\]])(?::(\d{1,5}))?")


class MediaUrlConfig(StrictModel):
    """Media by URL in chat messages: off while nothing is allowed.

    Attributes:
        allow: hosts that media may be fetched from: ``media.example.com``, ``*.example.com`` (any name below it), or
            with scheme and port: ``http://files.example.com:8080``. Without a scheme https is meant, without a port
            the scheme's own. A host with a private, loopback or link-local address is refused all the same.
        timeout_s: longest time for one URL, redirects and all.
        max_redirects: how many are followed; each one is checked like the first URL.
    """

    allow: tuple[str, ...] = ()
    timeout_s: float = Field(default=20, gt=0)
    max_redirects: int = Field(default=3, ge=0)

    @field_validator("allow")
    @classmethod
    def _origins(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        for entry in allow:
            if _MEDIA_ORIGIN.fullmatch(entry) is None:
                raise ValueError(f"{entry!r} is no host: write media.example.com, *.example.com or http://host:port")
        return allow

    def allows(self, scheme: str, host: str, port: int | None) -> bool:
        """Whether a URL of this scheme, lower-case host and port (None: the scheme's own) is allowed."""
        asked = (scheme, port or (443 if scheme == "https" else 80))
        for entry in self.allow:
            origin = _MEDIA_ORIGIN.fullmatch(entry)
            assert origin is not None
            secure = origin[1] != "http"
            wanted = ("https" if secure else "http", int(origin[3] or (443 if secure else 80)))
            named = origin[2].strip("[]")
            same = host.endswith(named[1:]) if named.startswith("*.") else host == named
            if same and wanted == asked:
                return True
        return False


class KeyLimits(StrictModel):
    """What one API key may do; None is no limit. Beyond one its requests are answered 429.

    Attributes:
        concurrent_requests: requests under way.
        requests_per_minute: requests let in, in any minute; as many may come at once.
    """

    concurrent_requests: int | None = Field(default=None, ge=1)
    requests_per_minute: int | None = Field(default=None, ge=1)


class IdleTimeouts(StrictModel):
    """Seconds after which a kind of output that fell silent in mid-stream ends it, unless its sources still speak."""

    text: float = Field(default=60, gt=0)
    audio: float = Field(default=60, gt=0)
    transcript: float = Field(default=60, gt=0)
    image: float = Field(default=60, gt=0)

    def of(self, kind: OutputKind) -> float:
        """The limit of one kind."""
        return {"text": self.text, "audio": self.audio, "transcript": self.transcript, "image": self.image}[kind]


class IngressConfig(StrictModel):
    """The HTTP side: limits, replicas, keys.

    Attributes:
        deployment: Ray Serve's own option names for the ingress.
        max_concurrent_requests: requests one ingress replica works on; one more is answered 503.
        max_audio_seconds: longest speech of one request; no stream lives longer. None takes the pipeline's.
        max_input_audio_seconds: longest clip accepted; None takes the pipeline's.
        max_body_mb, max_audio_mb: body and single decoded media part.
        max_image_mpixels: all pictures of one request together, in millions of pixels.
        max_video_seconds, max_video_mpixels: longest video; frames taken of all videos of one request together.
        max_images, max_made_mpixels, max_steps: pictures to make for one request, millions of pixels and steps of each.
        max_messages, max_text_chars, max_speech_chars: chat length, one message's text, ``/v1/audio/speech`` input.
        max_request_text_chars, max_media_parts: all text, and all media, of one request together. The text travels in
            one message of Serve's, which may have 4 MB.
        body_idle_timeout_s: longest silence while a body is being sent (and how long it may fall behind 10 kB/s).
        send_timeout_s: longest time in which a client takes nothing of its answer; then its stream is stopped. Only
            HAProxy mode with throughput mode shows us a slow reader; Serve's own proxy keeps what was made.
        max_answer_mb: encoded sound or pictures of one answer, streamed or not: what a proxy may have to keep for a
            slow reader.
        idle_timeout_s: longest silence of each kind of output.
        max_bodies_mb: bodies that one ingress replica reads or decodes at once; beyond it requests are answered 503.
        max_media_mb: decoded media that one ingress replica holds at once; beyond it requests are answered 503.
        api_keys_env: environment variable with API keys, ``name:key,name:key``; unset means no keys are asked for.
        key_limits, key_limits_of: limits of every key, and of single ones by their names instead. All are divided by
            the number of ingress replicas.
        cors_origins: web pages of these origins (``https://app.example.com``, or ``*``) may call; none by default.
        media_urls: where media may be fetched from.
        demo_page: whether ``/`` answers with a page to talk to the model.
        grace_s: how long a leaving replica may finish its streams; None is ``max_audio_seconds`` + 30.
        retry: one invisible retry when a replica dies before anything was sent.
        takeover: when a replica dies after that, another one goes on where it stopped, if the stages' engines can.
        max_takeovers: how often that may happen to one request.
        recovery_wait_s: how long faults may keep one request silent beyond ``streaming``'s own deadlines, in all its
            attempts together: while a stage that was up has no replica, or after a replica that never said a word.
    """

    deployment: dict[str, Any] = Field(default_factory=dict)
    max_concurrent_requests: int = Field(default=256, ge=1)
    max_audio_seconds: float | None = Field(default=None, gt=0)
    max_input_audio_seconds: float | None = Field(default=None, gt=0)
    max_body_mb: float = Field(default=64, gt=0)
    max_audio_mb: float = Field(default=40, gt=0)
    max_image_mpixels: float = Field(default=32, gt=0)
    max_video_seconds: float = Field(default=120, gt=0)
    max_video_mpixels: float = Field(default=64, gt=0)
    max_images: int = Field(default=10, ge=1)
    max_made_mpixels: float = Field(default=4.2, gt=0)
    max_steps: int = Field(default=100, ge=1)
    max_messages: int = Field(default=1000, ge=1)
    max_text_chars: int = Field(default=100_000, ge=1)
    max_speech_chars: int = Field(default=4096, ge=1)
    max_request_text_chars: int = Field(default=1_000_000, ge=1, le=1_000_000)
    max_media_parts: int = Field(default=16, ge=1)
    body_idle_timeout_s: float = Field(default=30, gt=0)
    send_timeout_s: float = Field(default=60, gt=0)
    max_answer_mb: float = Field(default=64, gt=0)
    idle_timeout_s: IdleTimeouts = IdleTimeouts()
    max_bodies_mb: float = Field(default=512, gt=0)
    max_media_mb: float = Field(default=2048, gt=0)
    api_keys_env: str | None = None
    key_limits: KeyLimits = KeyLimits()
    key_limits_of: dict[str, KeyLimits] = Field(default_factory=dict)
    cors_origins: tuple[str, ...] = ()
    media_urls: MediaUrlConfig = MediaUrlConfig()
    demo_page: bool = True
    grace_s: float | None = Field(default=None, gt=0)
    retry: bool = True
    takeover: bool = True
    max_takeovers: int = Field(default=2, ge=1)
    recovery_wait_s: float = Field(default=30, ge=1)

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise ValueError(f"{origin!r} is no origin: write https://app.example.com, without a path, or *")
        return origins

    @model_validator(mode="after")
    def _limits_have_keys(self) -> Self:
        if self.api_keys_env is None and (self.key_limits != KeyLimits() or self.key_limits_of):
            raise ValueError("key_limits and key_limits_of need api_keys_env: without keys everybody is the same")
        return self

    def longest_speech_s(self, pipeline: PipelineConfig) -> float:
        """Seconds of sound that one answer may have: the limit given here, or what ``pipeline`` is good for."""
        return self.max_audio_seconds or pipeline.max_audio_seconds

    def limits_of(self, key: str) -> KeyLimits:
        """The limits of the key of this name."""
        return self.key_limits_of.get(key, self.key_limits)
