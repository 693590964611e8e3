"""API keys: who is let in and how often, whose turn it is, what of them is ever shown; and web pages (CORS)."""

import asyncio
import logging
from typing import Any

import pytest
from api_fakes import (
    FULL,
    SPEECH_ONLY,
    FakeDispatcher,
    app_of,
    audio,
    check_error,
    client_of,
    eventually,
    text,
    transcript,
    wav,
)

from omni_ray.config.ingress import IngressConfig, KeyLimits
from omni_ray.errors import AuthenticationError, ConfigError, RateLimitedError
from omni_ray.serve.api.gate import Gate
from omni_ray.serve.api.keys import ANONYMOUS, ApiKeys, read_api_keys
from omni_ray.serve.api.shares import FIRST_GUESS_S, HALF_LIFE_S, Shares

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
HEARD = "/v1/audio/transcriptions"
CH: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "one two"}]}
SP: dict[str, Any] = {"model": "m", "input": "hello", "response_format": "pcm"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# --- which keys there are ---


def keys_in(monkeypatch: pytest.MonkeyPatch, value: str, **more: Any) -> dict[str, str]:
    monkeypatch.setenv("TEST_KEYS", value)
    return read_api_keys(IngressConfig(api_keys_env="TEST_KEYS", **more))


def test_several_keys_named_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_api_keys(IngressConfig()) == {}
    assert keys_in(monkeypatch, "sk-1") == {"key1": "sk-1"}
    assert keys_in(monkeypatch, " alice:sk-a , sk-2=,bob:sk:b, ") == {"alice": "sk-a", "key2": "sk-2=", "bob": "sk:b"}


@pytest.mark.parametrize("value", ["", " , ,", "a:secret-x,a:secret-y", "a:secret-x,b:secret-x", "secret-x,secret-x"])
def test_keys_that_are_missing_or_come_twice(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable would open the service to everybody. What is wrong is said without showing a key."""
    with pytest.raises(ConfigError) as caught:
        keys_in(monkeypatch, value)
    assert "TEST_KEYS" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_limits_for_a_name_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"alise": KeyLimits(concurrent_requests=1)}
    with pytest.raises(ConfigError, match="'alise' is no key's name; did you mean 'alice'"):
        keys_in(monkeypatch, "alice:sk-a,bob:sk-b", key_limits_of=limits)
    with pytest.raises(ValueError, match="need api_keys_env"):
        IngressConfig(key_limits=KeyLimits(requests_per_minute=5))


def test_every_key_is_compared_and_only_digests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a refusal tells neither how far a guess was right nor how long the key is."""
    compared: list[tuple[bytes, bytes]] = []

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("omni_ray.serve.api.keys.hmac.compare_digest", spy)
    keys = ApiKeys({"alice": "sk-a", "bob": "a much longer key", "x": "schl\xfcssel"})
    for guess in ("sk-a", "sk-", "nope" * 1000):
        compared.clear()
        try:
            assert keys.check(guess) == "alice"
        except AuthenticationError:
            assert guess != "sk-a"
        assert len(compared) == 3
        assert {len(side) for pair in compared for side in pair} == {32}
    assert keys.check("schl\xfcssel".encode().decode("latin-1")) == "x"  # as a header's UTF-8 bytes come
    assert "sk-a" not in repr(vars(keys))


async def test_neither_keys_nor_what_was_asked_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The log knows keys by their names. What clients write stays out of it, whether it is answered or refused."""
    caplog.set_level(logging.DEBUG)
    fake = FakeDispatcher(FULL, [*text("secret-answer"), *audio(10)])
    message = {"role": "user", "content": "secret-words"}
    async with client_of(fake, "secret-key") as client:
        headers = bearer("secret-key")
        for body in ({**CH, "messages": [message]}, {**CH, "messages": [message], "temperature": "secret"}, "secret{"):
            answer = await client.post(CHAT, json=body, headers=headers)
            assert answer.status_code == 200 or "secret" not in answer.text  # an error names the field, not its value
        await client.post(CHAT, json=CH, headers=bearer("secret-guess"))
        await client.post(f"{CHAT}?secret=1", json=CH, headers={**headers, "x-request-id": "secret request"})
        await client.get("/secret-path", headers=headers)
        fake.script = [ValueError("boom")]
        assert (await client.post(CHAT, json={**CH, "messages": [message]}, headers=headers)).status_code == 500
    ours = "".join(r.getMessage() + str(r.exc_info) for r in caplog.records if not r.name.startswith("http"))
    assert "key=name of secret-key" in ours
    assert "secret" not in ours.replace("name of secret-key", "")


# --- how much each may do ---


def gate_of(clock: Clock, replicas: int = 1, names: tuple[str, ...] = ("a", "b"), **config: Any) -> Gate:
    return Gate(IngressConfig(api_keys_env="X", **config), names, replicas, clock)


def test_requests_per_minute_of_each_key() -> None:
    clock = Clock()
    gate = gate_of(clock, key_limits=KeyLimits(requests_per_minute=6))
    for _ in range(6):
        with gate.passed("a"):
            pass
    with pytest.raises(RateLimitedError, match="6 requests per minute") as caught, gate.passed("a"):
        pytest.fail("one more than six")
    assert caught.value.retry_after_s == 10
    clock.now = 4.0
    with pytest.raises(RateLimitedError) as caught, gate.passed("a"):
        pytest.fail("too early")
    assert caught.value.retry_after_s == 6
    with gate.passed("b"), gate.passed(ANONYMOUS):
        pass
    clock.now = 10.0
    with gate.passed("a"):
        pass
    clock.now = 1e6
    for _ in range(6):
        with gate.passed("a"):
            pass
    with pytest.raises(RateLimitedError), gate.passed("a"):
        pytest.fail("a long pause saves no more than a minute's worth")


def test_limits_are_divided_by_the_replicas() -> None:
    gate = gate_of(Clock(), 3, key_limits=KeyLimits(concurrent_requests=7), key_limits_of={"b": KeyLimits()})
    with gate.passed("a"), gate.passed("a"), gate.passed("a"):
        with pytest.raises(RateLimitedError, match="3 requests under way"), gate.passed("a"):
            pytest.fail("a third of seven is three at most")
        with gate.passed("b"), gate.passed("b"), gate.passed("b"), gate.passed("b"):
            pass
    with gate.passed("a"):
        pass


def test_one_key_of_several_never_holds_all_places() -> None:
    """Without any configured limit: what one key leaves, another finds."""
    gate = gate_of(Clock(), max_concurrent_requests=4)
    with gate.passed("a"), gate.passed("a"), gate.passed("a"):
        with pytest.raises(RateLimitedError), gate.passed("a"):
            pytest.fail("three quarters of four")
        with gate.passed("b"):
            pass
    alone = gate_of(Clock(), names=("a",), max_concurrent_requests=1)
    with alone.passed("a"):
        pass


async def test_a_keys_own_limit_is_429_and_touches_no_other_key(virtual_time: None) -> None:
    """C59: before the body is read, with Retry-After, and a place is free again however the request ended."""
    limits = KeyLimits(concurrent_requests=1)
    config = IngressConfig(api_keys_env="X", key_limits=limits)
    fake = FakeDispatcher(FULL, lambda request: [0.3, *text("one")], config=config)
    async with client_of(fake, "k1", "k2") as client:
        first = asyncio.create_task(client.post(CHAT, json=CH, headers=bearer("k1")))
        await eventually(lambda: fake.open == 1)
        refused = await client.post(CHAT, content=b"never read", headers=bearer("k1"))
        error = check_error(refused, 429)
        assert error["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
        assert (await client.post(CHAT, json=CH, headers=bearer("k2"))).status_code == 200
        assert (await first).status_code == 200
        check_error(await client.post(CHAT, content=b"{", headers=bearer("k1")), 400)
        assert (await client.post(CHAT, json=CH, headers=bearer("k1"))).status_code == 200
    assert fake.active == 0


async def test_requests_per_minute_over_http() -> None:
    config = IngressConfig(api_keys_env="X", key_limits_of={"name of k1": KeyLimits(requests_per_minute=1)})
    fake = FakeDispatcher(FULL, text("one"), config=config)
    async with client_of(fake, "k1", "k2") as client:
        statuses = [
            (await client.post(CHAT, json=CH, headers=bearer(key))).status_code for key in ("k1", "k1", "k2", "k2")
        ]
        assert statuses == [200, 429, 200, 200]
        assert (await client.get("/v1/models", headers=bearer("k1"))).status_code == 200
    assert fake.active == 0


# --- whose turn it is ---


async def test_default_priorities_and_nobody_jumps_the_line() -> None:
    """Chat before speech before whole files; a client may step back, and is told when it may not step forward."""
    fake = FakeDispatcher(FULL, [*transcript("x"), *text("one"), *audio(480)])
    whole = {**SP, "response_format": "flac"}
    async with client_of(fake) as client:
        asked = [
            (CHAT, CH, 0, False), (CHAT, {**CH, "priority": 7}, 7, False), (SPEECH, SP, 1, False),
            (SPEECH, {**SP, "stream": True}, 1, False), (SPEECH, whole, 2, False),
            (SPEECH, {**SP, "stream": False}, 2, False), (SPEECH, {**SP, "priority": 0}, 1, True),
            (SPEECH, {**whole, "priority": 1}, 2, True), (SPEECH, {**whole, "priority": 3}, 3, False),
        ]  # fmt: skip
        for url, body, priority, ignored in asked:
            response = await client.post(url, json=body)
            assert response.status_code == 200, response.text
            assert fake.requests[-1].priority == priority, body
            assert ("priority" in response.headers.get("x-omni-ray-ignored", "")) == ignored, body
        await client.post(HEARD, data={"model": "m"}, files={"file": ("f", wav([0.1] * 99))})
    assert fake.requests[-1].priority == 1


async def test_the_last_places_are_for_chat(virtual_time: None) -> None:
    config = IngressConfig(max_concurrent_requests=8)
    fake = FakeDispatcher(FULL, lambda request: [0.2, *text("one"), *audio(480)], config=config)
    async with client_of(fake) as client:
        flood = [asyncio.create_task(client.post(SPEECH, json=SP)) for _ in range(7)]
        await eventually(lambda: fake.open == 7)
        check_error(await client.post(SPEECH, json=SP), 503)
        assert (await client.post(CHAT, json=CH)).status_code == 200
        assert [r.status_code for r in await asyncio.gather(*flood)] == [200] * 7
    only_speech = FakeDispatcher(SPEECH_ONLY, lambda request: [0.1, *audio(480)], config=config)
    async with client_of(only_speech) as client:
        flood = [asyncio.create_task(client.post(SPEECH, json=SP)) for _ in range(8)]
        assert [r.status_code for r in await asyncio.gather(*flood)] == [200] * 8


async def test_sound_served_to_a_key_orders_its_next_requests() -> None:
    fake = FakeDispatcher(SPEECH_ONLY, audio(48_000))
    async with client_of(fake, "k1", "k2") as client:
        for key in ("k1", "k1", "k2"):
            await client.post(SPEECH, json=SP, headers=bearer(key))
    first, second, other = (r.served_s for r in fake.requests)
    assert first == 0 == other
    assert second == pytest.approx(2, rel=0.05)


async def test_a_flood_does_not_come_in_at_the_rank_of_its_first_request(virtual_time: None) -> None:
    """What is under way counts: the tenth request of one key stands behind the first of another that comes later."""
    fake = FakeDispatcher(SPEECH_ONLY, lambda request: [0.2, *audio(48_000)])
    async with client_of(fake, "k1", "k2") as client:
        flood = [asyncio.create_task(client.post(SPEECH, json=SP, headers=bearer("k1"))) for _ in range(10)]
        await eventually(lambda: fake.open == 10)
        await client.post(SPEECH, json=SP, headers=bearer("k2"))
        await asyncio.gather(*flood)
        await client.post(SPEECH, json=SP)
    ranks = [r.served_s for r in fake.requests]
    assert ranks[:10] == [FIRST_GUESS_S * n for n in range(10)]
    assert ranks[10] == 0


def test_shares_fade_and_nobody_saves_up() -> None:
    clock = Clock()
    shares = Shares(clock)
    with shares.share("a", lambda: 80.0):
        pass
    clock.now = HALF_LIFE_S
    assert shares.of("a") == pytest.approx(40)
    with shares.share("a", lambda: 0.0) as busy:
        assert busy == pytest.approx(40)
        with shares.share("newcomer", lambda: 0.0) as rank:
            assert rank == pytest.approx(40)
            with shares.share("newcomer", lambda: 100.0) as second, shares.share("newcomer", lambda: 0.0) as third:
                assert second == pytest.approx(rank + 12.5)  # by now an answer usually has 5 + 0.1 * (80 - 5) s
                assert third == pytest.approx(rank + 12.5 + 100)
    with shares.share(ANONYMOUS, lambda: 5.0) as nobody:
        assert nobody == 0
    assert shares.of(ANONYMOUS) == 0


# --- web pages ---


async def test_other_origins_are_off_by_default() -> None:
    fake = FakeDispatcher(FULL, text("one"))
    ask = {"origin": "https://evil.test", "access-control-request-method": "POST"}
    async with client_of(fake) as client:
        for response in (
            await client.options(CHAT, headers=ask),
            await client.post(CHAT, json=CH, headers={"origin": "https://evil.test"}),
        ):
            assert not [name for name in response.headers if name.startswith("access-control")]


async def test_an_allowed_origin_may_call_and_read_our_headers() -> None:
    fake = FakeDispatcher(FULL, text("one"), config=IngressConfig(cors_origins=("https://app.test",)))
    mine = {"origin": "https://app.test"}
    async with client_of(fake, "k") as client:
        preflight = await client.options(
            CHAT,
            headers={
                **mine,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type,openai-organization,x-stainless-lang",
            },
        )
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://app.test"
        assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in preflight.headers
        for response in (
            await client.post(CHAT, json=CH, headers={**mine, **bearer("k")}),
            await client.post(CHAT, json=CH, headers=mine),  # refused, and a page must be able to see why
        ):
            assert response.headers["access-control-allow-origin"] == "https://app.test"
            assert "x-omni-ray-ignored" in response.headers["access-control-expose-headers"].lower()
        evil = await client.post(CHAT, json=CH, headers={"origin": "https://evil.test", **bearer("k")})
        assert "access-control-allow-origin" not in evil.headers


@pytest.mark.parametrize(
    "origin", ["app.test", "https://app.test/", "https://app.test/x", "null", "", "https://*.test"]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ValueError, match="is no origin"):
        IngressConfig(cors_origins=(origin,))


def test_the_document_says_what_priority_means() -> None:
    paths = app_of(FakeDispatcher()).openapi()["paths"]
    for url in (CHAT, SPEECH):
        schema = paths[url]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "smaller numbers" in schema["properties"]["priority"]["description"]
