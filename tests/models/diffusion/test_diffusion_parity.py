"""``diffusion`` on a tiny random Stable Diffusion 3: diffusers' own pictures, bit for bit, alone and among others."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from diffusers import StableDiffusion3Pipeline
from numpy.typing import NDArray

from omni_ray.engine.base import EngineContext
from omni_ray.engine.diffusion import DiffusionEngine
from omni_ray.engine.options import DiffusionOptions
from omni_ray.engine.types import Finish, ImageChunk, ImagePrompt, Output, Request, StepChunk, Usage
from omni_ray.errors import ConfigError, InvalidRequestError, SaturatedError
from omni_ray.models.diffusion.checkpoint import make_tiny
from omni_ray.models.diffusion.model import DiffusersTextToImage
from omni_ray.models.diffusion.pipeline import PIPELINE

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = ImagePrompt("a red cat", steps=5)
Pixels = NDArray[np.uint8]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("diffusion") / "tiny"
    make_tiny(out)
    return out


def engine(model: Path, **options: Any) -> DiffusionEngine:
    context = EngineContext(PIPELINE.stage("painter"), str(model), DiffusersTextToImage, DiffusionOptions(**options))
    return DiffusionEngine(context)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started(tiny: Path) -> DiffusionEngine:
    made = engine(tiny, max_num_seqs=4, max_queue=0)
    await made.start()
    return made


def outputs_of(made: DiffusionEngine, prompt: ImagePrompt, seed: int) -> Any:
    async def inputs() -> AsyncIterator[ImagePrompt]:
        yield prompt

    request = Request(f"r{seed}", seed=seed, priority=1, image_prompt=prompt)
    return aclosing(made.generate(request, {"request": inputs()}))


async def paint(made: DiffusionEngine, prompt: ImagePrompt = PROMPT, seed: int = 1) -> list[Output]:
    async with outputs_of(made, prompt, seed) as outputs:
        return [output async for output in outputs]


def pictures(outputs: list[Output], *, preview: bool = False) -> list[Pixels]:
    return [o.pixels for o in outputs if isinstance(o, ImageChunk) and o.preview is preview]


@pytest.fixture(scope="module")
def upstream(tiny: Path) -> Any:
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny, text_encoder_3=None, tokenizer_3=None)
    pipeline.set_progress_bar_config(disable=True)

    def call(seed: int, **arguments: Any) -> Pixels:
        generator = torch.Generator("cpu").manual_seed(seed)
        return np.asarray(pipeline("a red cat", generator=generator, **arguments).images[0])

    return call


async def test_pictures_are_upstreams_alone_and_among_others(started: DiffusionEngine, upstream: Any):
    """Bit for bit, with every argument; picture i of a request is that of its seed + i; previews change nothing."""
    wide = ImagePrompt("a red cat", negative="a dog", count=2, width=96, height=48, steps=4, guidance_scale=3.0)
    asked = [(PROMPT, 1), (PROMPT, 2), (wide, 2**63 - 1), (ImagePrompt("a red cat", steps=5, previews=2), 1)]
    alone = [await paint(started, prompt, seed) for prompt, seed in asked]
    expected = [upstream(1, num_inference_steps=5)], [upstream(2, num_inference_steps=5)]
    sized = {"negative_prompt": "a dog", "width": 96, "height": 48, "num_inference_steps": 4, "guidance_scale": 3.0}
    wanted = [*expected, [upstream(2**63 - 1, **sized), upstream(0, **sized)], expected[0]]
    for outputs, pixels in zip(alone, wanted, strict=True):
        np.testing.assert_array_equal(pictures(outputs), pixels)
    assert np.ptp(wanted[0][0]) > 50
    assert len({pixels[0].tobytes() for pixels in wanted}) == 3
    together = await asyncio.gather(*(paint(started, prompt, seed) for prompt, seed in asked))
    for outputs, before in zip(together, alone, strict=True):
        np.testing.assert_array_equal(pictures(outputs), pictures(before))

    first, _, two, previewed = alone
    assert first[:-2] == [StepChunk(i, i + 1, 5) for i in range(5)]
    assert first[-1] == Finish("stop", Usage(prompt_tokens=9, image_tokens=32 * 32))
    assert [o for o in two if isinstance(o, StepChunk)] == [StepChunk(i, i % 4 + 1, 4) for i in range(8)]
    assert [(o.position, o.row, o.height) for o in two if isinstance(o, ImageChunk)] == [(0, 0, 48), (48, 0, 48)]
    assert two[-1] == Finish("stop", Usage(prompt_tokens=9, image_tokens=2 * 48 * 24))
    looks = pictures(previewed, preview=True)
    assert [type(o).__name__[0] for o in previewed] == list("SSISSISIF"), "after steps 2 and 4 of 5, and at the end"
    assert len({look.tobytes() for look in looks}) == 2
    assert all(not np.array_equal(look, expected[0][0]) for look in looks)
    assert started.stats().running == 0


async def test_a_preview_after_the_last_step_is_the_picture(started: DiffusionEngine, tiny: Path):
    looks: list[Pixels | None] = []
    painted = started._model.paint(PROMPT, 1, lambda step, steps, preview: looks.append(preview()))
    assert len(looks) == 5
    np.testing.assert_array_equal(looks[-1], painted.pixels)


async def test_cancelling_stops_between_steps_and_frees_the_place(started: DiffusionEngine):
    """Four fill the engine, the fifth is refused; who leaves after a step makes room within one more."""
    endless = ImagePrompt("a red cat", steps=1000)
    busy = [outputs_of(started, endless, seed) for seed in range(4)]
    streams = [await stream.__aenter__() for stream in busy]
    for stream in streams:
        assert isinstance(await anext(stream), StepChunk)
    with pytest.raises(SaturatedError):
        await paint(started)
    await started.check_health()
    for stream in busy:
        await stream.__aexit__(None, None, None)
    assert started._runs, "the places are held until the threads have ended"
    await asyncio.wait(list(started._runs.values()), timeout=20)
    assert started.stats().running == 0
    assert pictures(await paint(started))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (ImagePrompt("x", width=66, height=64), "size"),
        (ImagePrompt("x", width=64, height=30), "size"),
        (ImagePrompt("x", true_cfg_scale=2), "true_cfg_scale"),
    ],
)
async def test_what_the_model_cannot_do_is_refused(started: DiffusionEngine, prompt: ImagePrompt, param: str):
    with pytest.raises(InvalidRequestError) as caught:
        await paint(started, prompt)
    assert caught.value.param == param
    assert started.stats().running == 0


def changed(tiny: Path, out: Path, **index: Any) -> Path:
    shutil.copytree(tiny, out)
    said = json.loads((out / "model_index.json").read_text())
    (out / "model_index.json").write_text(json.dumps({**said, **index}))
    return out


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"_class_name": ["pipeline", "Evil"]}, "is no pipeline of diffusers"),
        ({"_class_name": "os"}, "is no pipeline of diffusers"),
        ({"_class_name": "DiffusionPipeline"}, "is no pipeline of diffusers"),
        ({"_class_name": "AutoencoderKL"}, "is no pipeline of diffusers"),
        ({"_class_name": "WanPipeline"}, "WanPipeline makes no pictures"),
        ({"_class_name": "StableDiffusionImg2ImgPipeline"}, "Img2ImgPipeline needs a picture"),
        ({"vae": ["evil", "Vae"]}, "vae is .*a checkpoint's own code is not run"),
        ({"vae": ["os", "system"]}, "vae is .*a checkpoint's own code is not run"),
        ({"vae": "x"}, "vae must not be a string"),
    ],
)
async def test_a_hostile_or_unfit_index_stops_the_start(tiny: Path, tmp_path: Path, index: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        engine(changed(tiny, tmp_path / "x", **index))._model.load()


@pytest.mark.parametrize("part", ["text_encoder", "vae"])
async def test_a_missing_tensor_and_a_pickle_stop_the_start(tiny: Path, tmp_path: Path, part: str):
    """Upstream would draw the tensor at random and unpickle whatever the file holds."""
    from safetensors.torch import load_file, save_file

    broken = changed(tiny, tmp_path / "x")
    (file,) = (broken / part).glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[0]
    gone = tensors.pop(name)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=name):
        engine(broken)._model.load()
    if part == "text_encoder":
        return
    tensors[name] = gone * float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"{part}.{name} is not finite"):
        engine(broken)._model.load()
    torch.save(tensors, file.with_name("diffusion_pytorch_model.bin"))
    file.unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        engine(broken)._model.load()
