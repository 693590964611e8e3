"""``diffusion`` through real Ray Serve over HTTP with openai-python, on a tiny random checkpoint."""

import asyncio
import base64
import io
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from omni_ray.models.diffusion.checkpoint import make_tiny
from omni_ray.selection import select
from tests.conftest import Serving, wait_until

README = (Path(__file__).parents[2] / "README.md").read_text()


def pixels_of(b64_json: str | None) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(base64.b64decode(b64_json or ""))) as image:
        return np.asarray(image)


def upstream(tiny: Path, prompt: str, seed: int, **arguments: Any) -> NDArray[np.uint8]:
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny, text_encoder_3=None, tokenizer_3=None)
    pipeline.set_progress_bar_config(disable=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the stage's `threads`; with more, sums round otherwise
    try:
        painted = pipeline(prompt, generator=torch.Generator("cpu").manual_seed(seed), **arguments)
    finally:
        torch.set_num_threads(threads)
    return np.asarray(painted.images[0])


async def test_a_checkpoint_alone_is_served_and_paints_as_diffusers_does(serving: Serving, tmp_path: Path) -> None:
    """Chosen by its model_index.json; four at once are the four alone; a large picture; one who hangs up frees."""
    make_tiny(tmp_path / "tiny")
    chosen = select(str(tmp_path / "tiny"))
    assert chosen.pipeline == "diffusion"
    assert chosen.reason == "_class_name StableDiffusion3Pipeline, which makes pictures of text"
    engine = {"max_num_seqs": 2, "num_inference_steps": 3}
    app = serving(chosen.pipeline, {"model": chosen.model, "stages": {"painter": {"engine": engine}}})
    async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="x", max_retries=0, timeout=120) as client:

        async def paint(seed: int, **more: Any) -> list[NDArray[np.uint8]]:
            answer = await client.images.generate(prompt="a red cat", extra_body={"seed": seed}, **more)
            assert answer.usage is not None
            assert answer.usage.output_tokens_details is not None
            assert answer.usage.output_tokens_details.image_tokens == len(answer.data or ()) * 32 * 32
            return [pixels_of(image.b64_json) for image in answer.data or ()]

        alone = [await paint(seed, n=1 + seed) for seed in range(2)]
        np.testing.assert_array_equal(alone[0][0], upstream(tmp_path / "tiny", "a red cat", 0, num_inference_steps=3))
        together = await asyncio.gather(*(paint(seed, n=1 + seed) for seed in (0, 1, 0, 1)))
        for pictures, before in zip(together, alone * 2, strict=True):
            np.testing.assert_array_equal(pictures, before)

        stream = await client.images.generate(
            prompt="a red cat", stream=True, partial_images=1, extra_body={"seed": 0, "num_inference_steps": 3}
        )
        *partial, completed = [event async for event in stream]
        assert [event.type for event in partial] == ["image_generation.partial_image"]
        np.testing.assert_array_equal(pixels_of(completed.b64_json), alone[0][0])

        body = next(b for b in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if "/v1/images" in b)
        body = body.replace("http://127.0.0.1:8000", app.url)
        await asyncio.to_thread(subprocess.run, ["bash", "-eo", "pipefail", "-c", body], cwd=tmp_path, check=True)
        painted = np.asarray(Image.open(tmp_path / "cat.png"))
        np.testing.assert_array_equal(painted, upstream(tmp_path / "tiny", "a red cat", 7, num_inference_steps=20))

        with pytest.raises(openai.BadRequestError) as refused:
            await client.images.generate(prompt="a", size="66x64")
        assert refused.value.param == "size"
        assert "multiples of 4" in refused.value.message
        with pytest.raises(openai.NotFoundError):
            await client.audio.speech.create(model="diffusion", input="a", voice="alloy")

    replicas = app.replicas()
    asked = {"prompt": "a", "stream": True, "num_inference_steps": 100, "size": "96x96"}
    with app.client() as http, http.stream("POST", "/v1/images/generations", json=asked) as response:
        assert next(response.iter_lines()).startswith(": step 1 of 100")
    wait_until(lambda: not any(app.ongoing().values()), 20)
    assert app.replicas() == replicas
