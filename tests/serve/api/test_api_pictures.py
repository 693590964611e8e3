"""``POST /v1/images/generations``: OpenAI's shapes, with the unmodified openai client, over a scripted dispatcher."""

import base64
import io
from typing import Any

import numpy as np
import openai
import pytest
from api_fakes import PAINTER, FakeDispatcher, check_error, client_of, serving
from numpy.typing import NDArray
from PIL import Image

from omni_ray.config.ingress import IngressConfig
from omni_ray.engine.types import Finish, ImageChunk, ImagePrompt, Output, StepChunk, Usage
from omni_ray.errors import StageFailedError
from omni_ray.serve.events import OutputEvent
from omni_ray.serve.outbox import pieces_of

WIDE, TALL = 1000, 700
RNG = np.random.default_rng(0)
PIXELS = [RNG.integers(0, 256, (TALL, WIDE, 3), np.uint8) for _ in range(3)]
FINISH = Finish("stop", Usage(prompt_tokens=5, image_tokens=7))


def script(*pictures: NDArray[np.uint8], previews: int = 0) -> list[OutputEvent]:
    """Each picture in the pieces that a stage sends; the first ``previews`` are no finished ones."""
    outputs: list[Output] = []
    for i, pixels in enumerate(pictures):
        outputs += [StepChunk(i, i + 1, 3), *pieces_of(ImageChunk(i * TALL, pixels, 0, TALL, i < previews))]
    assert len(outputs) > 2 * len(pictures), "pictures come in several pieces"
    return [OutputEvent("painter", output) for output in (*outputs, FINISH)]


def decoded(b64_json: str | None, format: str = "PNG") -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(base64.b64decode(b64_json or ""))) as image:
        assert image.format == format
        return np.asarray(image)


async def test_openai_python_gets_every_pixel() -> None:
    """Whole, streamed with previews, and as jpeg; what was asked reaches the stage."""
    fake = FakeDispatcher(PAINTER, lambda r: script(*PIXELS, previews=r.image_prompt.previews if r.image_prompt else 0))
    extra = {"negative_prompt": "a dog", "num_inference_steps": 9, "guidance_scale": 2.5, "seed": 11}
    with serving(fake) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            answer = await client.images.generate(prompt="a cat", model="m", n=3, size="1000x700", extra_body=extra)
            jpeg = await client.images.generate(
                prompt="a cat", output_format="jpeg", output_compression=40, response_format="b64_json"
            )
            stream = await client.images.generate(prompt="a cat", stream=True, partial_images=2)
            events = [event async for event in stream]
    assert answer.data is not None
    assert answer.usage is not None
    for image, pixels in zip(answer.data, PIXELS, strict=True):
        np.testing.assert_array_equal(decoded(image.b64_json), pixels)
    assert (answer.size, answer.output_format, answer.background) == ("1000x700", "png", "opaque")
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (5, 7, 12)
    assert jpeg.data is not None
    assert decoded(jpeg.data[0].b64_json, "JPEG").shape == (TALL, WIDE, 3)
    assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    for index, (event, pixels) in enumerate(zip(events, PIXELS, strict=True)):
        np.testing.assert_array_equal(decoded(event.b64_json), pixels)
        assert (event.size, event.output_format, event.quality) == ("1000x700", "png", "auto")
        if event.type == "image_generation.partial_image":
            assert event.partial_image_index == index
        else:
            assert event.usage.total_tokens == 12
    first, second, third = fake.requests
    assert first.image_prompt == ImagePrompt("a cat", "a dog", 3, 1000, 700, 9, 2.5)
    assert (first.seed, first.priority) == (11, 1)
    assert second.image_prompt == ImagePrompt("a cat")
    assert third.image_prompt == ImagePrompt("a cat", previews=2)
    assert fake.open == fake.active == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": " \u200b"}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 11}, "n"),
        ({"n": 2, "stream": True}, "n"),
        ({"n": "2"}, "n"),
        ({"size": "64"}, "size"),
        ({"size": "0x64"}, "size"),
        ({"size": "99999x99999"}, "size"),
        ({"size": "2050x2050"}, "size"),
        ({"response_format": "url"}, "response_format"),
        ({"output_format": "gif"}, "output_format"),
        ({"output_compression": 50}, "output_compression"),
        ({"background": "transparent"}, "background"),
        ({"partial_images": 1}, "partial_images"),
        ({"partial_images": 4, "stream": True}, "partial_images"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 101}, "num_inference_steps"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"seed": -1}, "seed"),
    ],
)
async def test_bad_fields_are_400_naming_the_field(fields: dict[str, Any], param: str) -> None:
    fake = FakeDispatcher(PAINTER)
    async with client_of(fake) as client:
        check_error(await client.post("/v1/images/generations", json={"prompt": "a", **fields}), 400, param)
    assert not fake.requests


async def test_the_rest_of_the_route() -> None:
    """No such route without pictures; unknown fields are named; an error in mid-stream is one event."""
    async with client_of(FakeDispatcher()) as client:
        error = check_error(await client.post("/v1/images/generations", json={"prompt": "a"}), 404)
        assert "makes no image" in error["message"]
    async with client_of(FakeDispatcher(PAINTER, script(PIXELS[0]))) as client:
        check_error(await client.post("/v1/images/generations", json={"prompt": "a", "model": "x"}), 404, "model")
        asked = {"prompt": "a", "quality": "high", "user": "u", "priority": 0}
        response = await client.post("/v1/images/generations", json=asked)
        assert response.status_code == 200
        assert response.headers["x-omni-ray-ignored"] == "priority,quality,user"
        streamed = await client.post("/v1/images/generations", json={"prompt": "a", "stream": True})
        assert streamed.text.startswith(": step 1 of 3\n\n")
    broken = [*script(PIXELS[0])[:2], StageFailedError("it broke")]
    async with client_of(FakeDispatcher(PAINTER, broken)) as client:
        streamed = await client.post("/v1/images/generations", json={"prompt": "a", "stream": True})
        assert "event: error\n" in streamed.text
        assert "it broke" in streamed.text
        assert "completed" not in streamed.text
    small = FakeDispatcher(PAINTER, script(PIXELS[0]), config=IngressConfig(max_answer_mb=0.1))
    async with client_of(small) as client:
        error = check_error(await client.post("/v1/images/generations", json={"prompt": "a"}), 500)
        assert "max_answer_mb" in error["message"]


@pytest.mark.parametrize(
    "wrong",
    [
        [ImageChunk(1, PIXELS[0], 0, TALL)],
        [ImageChunk(0, PIXELS[0][:9], 0, TALL), ImageChunk(10, PIXELS[0][10:], 10, TALL)],
        [ImageChunk(0, PIXELS[0][:9], 0, TALL), ImageChunk(9, PIXELS[0][9:], 9, TALL, preview=True)],
    ],
)
async def test_rows_that_do_not_follow_are_an_error(wrong: list[Output]) -> None:
    events = [OutputEvent("painter", output) for output in (*wrong, FINISH)]
    async with client_of(FakeDispatcher(PAINTER, events)) as client:
        error = check_error(await client.post("/v1/images/generations", json={"prompt": "a"}), 500)
        assert "was due" in error["message"]
