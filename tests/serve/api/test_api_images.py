"""Pictures in chats: what reaches the stages, and what is refused before anything starts."""

import io
from typing import Any

import numpy as np
import pytest
from api_fakes import TEXT_ONLY, FakeDispatcher, b64, check_error, client_of, text, wav

from omni_ray.config.ingress import IngressConfig
from omni_ray.config.pipeline import Edge, PipelineConfig, RequestPart, StageExecutionType, StagePipelineConfig
from omni_ray.engine.types import AudioClip, ImageClip, MediaPart, TextPart

URL = "/v1/chat/completions"
PNG = "data:image/png;base64,iVBORw0KGgo="
TAKEN: tuple[tuple[RequestPart, ...], ...] = (
    ("messages",),
    ("messages", "input_audio"),
    ("messages", "input_image"),
    ("messages", "input_audio", "input_image"),
)
SEEING = PipelineConfig(
    name="seeing",
    description="test",
    stages=(
        StagePipelineConfig(
            name="thinker",
            execution_type=StageExecutionType.LLM_AR,
            model_arch="X",
            final_output_type="text",
            inputs=tuple(Edge(source="request", processor="x:y", parts=parts) for parts in TAKEN),
        ),
    ),
)


def picture(width: int, height: int, format: str = "PNG", **kwargs: Any) -> bytes:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(width * height)
    out = io.BytesIO()
    image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(out, format, **kwargs)
    return out.getvalue()


def image_part(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{b64(data)}"}}


def chat(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": list(parts)}, {"role": "user", "content": "so?"}]}


async def post(fake: FakeDispatcher, body: Any) -> Any:
    async with client_of(fake) as client:
        return await client.post(URL, json=body)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8265/api",
        "https://example.com/a.png",
        "http://169.254.169.254/latest",
        "file:///etc/passwd",
        "/etc/passwd",
        "ftp://x/a.png",
        "",
        "iVBORw0KGgo=",
    ],
)
async def test_c06_pictures_are_never_fetched(url: str):
    fake = FakeDispatcher(SEEING, text("ok"))
    part = {"type": "image_url", "image_url": {"url": url}}
    error = check_error(await post(fake, chat(part)), 400, "messages[0].content[0].image_url.url")
    assert "media by URL is off" in error["message"]
    assert not fake.requests


@pytest.mark.parametrize(
    ("part", "role", "param"),
    [
        ({"type": "image_url"}, "user", "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": PNG}, "user", "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": {"url": 1}}, "user", "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": {"url": PNG}}, "system", "messages[0].content[0]"),
        ({"type": "image_url", "image_url": {"url": PNG}}, "assistant", "messages[0].content[0]"),
        ({"type": "film_url", "film_url": {"url": PNG}}, "user", "messages[0].content[0].type"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,???"}}, "user",
         "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,raw"}}, "user",
         "messages[0].content[0].image_url.url"),
    ],
)  # fmt: skip
async def test_refused_before_anything_starts(part: Any, role: str, param: str):
    fake = FakeDispatcher(SEEING, text("ok"))
    check_error(await post(fake, chat(part, role=role)), 400, param)
    assert not fake.requests


async def test_a_pipeline_without_eyes_says_so():
    fake = FakeDispatcher(TEXT_ONLY, text("ok"))
    error = check_error(await post(fake, chat({"type": "image_url", "image_url": {"url": PNG}})), 400, "messages")
    assert "input_image" in error["message"]
    assert not fake.requests


async def test_pictures_and_sound_reach_the_stages_in_order():
    fake = FakeDispatcher(SEEING, text("ok"))
    first, second = picture(5, 3), picture(2, 7)
    sound = {"type": "input_audio", "input_audio": {"data": b64(wav(np.full(1600, 0.1)))}}
    parts = [{"type": "text", "text": "look"}, image_part(first), sound, image_part(second, "audio/ogg")]
    assert (await post(fake, chat(*parts))).status_code == 200
    (request,), (clips,) = fake.requests, fake.clips
    assert request.messages[0].content == (
        TextPart("look"), MediaPart("image", 0), MediaPart("audio", 1), MediaPart("image", 2),
    )  # fmt: skip
    assert [type(clip) for clip in clips] == [ImageClip, AudioClip, ImageClip]
    assert [clip.index for clip in clips] == [0, 1, 2]
    assert isinstance(clips[0], ImageClip)
    assert clips[0].pixels.shape == (3, 5, 3)
    assert clips[0].pixels.dtype == np.uint8
    assert fake.plans[0].stages[0].edges == (3,)


async def test_what_is_no_picture_is_refused():
    pytest.importorskip("PIL")
    for data in (wav(np.zeros(99)), b"plain text", picture(9, 9)[:120], picture(9, 9)[:20], picture(4, 4, "BMP")):
        fake = FakeDispatcher(SEEING, text("ok"))
        error = check_error(await post(fake, chat(image_part(data))), 400, "messages[0].content[0].image_url.url")
        assert "not a decodable picture" in error["message"]
        assert not fake.requests


async def test_c55_pixels_of_all_pictures_are_bounded():
    fake = FakeDispatcher(SEEING, text("ok"), config=IngressConfig(max_image_mpixels=0.01))
    body = chat(image_part(picture(100, 60)), image_part(picture(100, 60)))
    error = check_error(await post(fake, body), 400, "messages[0].content[1].image_url.url")
    assert "megapixels" in error["message"]
    assert (await post(fake, chat(image_part(picture(100, 100))))).status_code == 200
    big = IngressConfig(max_audio_mb=0.001)
    check_error(
        await post(FakeDispatcher(SEEING, text("ok"), config=big), chat(image_part(picture(100, 60)))),
        413,
        "messages[0].content[0].image_url.url",
    )


async def test_c55_at_most_so_many_media_parts():
    fake = FakeDispatcher(SEEING, text("ok"), config=IngressConfig(max_media_parts=2))
    part = {"type": "image_url", "image_url": {"url": PNG}}
    check_error(await post(fake, chat(part, part, part)), 400, "messages[0].content[2]")
