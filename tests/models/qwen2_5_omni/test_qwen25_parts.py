"""What a checkpoint becomes, its speakers, its codec alone, its talker's draws, and what is spoken of an answer."""

import asyncio
import json
import pickle
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.ar import AREngine
from omni_ray.engine.base import EngineContext
from omni_ray.engine.codec import CodecEngine
from omni_ray.engine.resume import Resume
from omni_ray.engine.types import AudioChunk, CodeFrameChunk, LatentChunk, PromptChunk, Request, TextChunk
from omni_ray.errors import ConfigError, InvalidRequestError, NonFiniteAudioError, StageFailedError
from omni_ray.models.qwen2_5_omni.checkpoint import make_tiny
from omni_ray.models.qwen2_5_omni.options import TalkerOptions, Token2WavOptions
from omni_ray.models.qwen2_5_omni.pipeline import TALKER, TOKEN2WAV, resolve
from omni_ray.models.qwen2_5_omni.positions import ImageGrid, rope_positions
from omni_ray.models.qwen2_5_omni.processors import talker_inputs
from omni_ray.models.qwen2_5_omni.speakers import SPEAKER_FILE, load_speakers
from omni_ray.models.qwen2_5_omni.talker import Qwen2_5OmniTalker
from omni_ray.models.qwen2_5_omni.talker_input import TalkerPrompt, TalkerRows
from omni_ray.models.qwen2_5_omni.tiny_config import CODES, HIDDEN
from omni_ray.models.qwen2_5_omni.token2wav import Qwen2_5OmniToken2Wav
from omni_ray.registry import load_pipeline
from omni_ray.selection import select_for_checkpoint
from omni_ray.serve.planner import all_plans

Rows = NDArray[np.float32]


def names(pipeline: Any) -> list[str]:
    return [stage.name for stage in pipeline.topological()]


def test_a_checkpoint_selects_its_stages(tiny25: Path, tmp_path: Path) -> None:
    assert select_for_checkpoint(str(tiny25)).pipeline == "qwen2_5_omni"
    spoken = load_pipeline("qwen2_5_omni", str(tiny25))
    assert names(spoken) == ["thinker", "talker", "token2wav"]
    assert (spoken.voices.names, spoken.voices.default) == (("Chelsie", "Ethan"), "Chelsie")
    config = json.loads((tiny25 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "enable_audio_output": False}))
    silent = load_pipeline("qwen2_5_omni", str(tmp_path))
    assert (names(silent), silent.output_kinds(), silent.voices.names) == (["thinker"], ("text",), ())
    assert all(plan.names() == ("thinker",) for plan in all_plans(silent))
    assert resolve({}) == resolve({"enable_audio_output": True})


def test_equal_seeds_make_equal_tensors(tiny25: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (tiny25 / "model.safetensors").read_bytes()


def test_positions_equal_upstream(upstream25: Any, tiny25: Path) -> None:
    config = upstream25.config.thinker_config
    image, begin, end = config.image_token_id, config.vision_start_token_id, config.vision_end_token_id
    grids = (ImageGrid(2, 3), ImageGrid(4, 1))
    ids = [1, 2, begin, *[image] * 6, end, begin, *[image] * 4, end, 3, 4]
    axes, delta = upstream25.thinker.get_rope_index(
        torch.tensor([ids]),
        torch.tensor([[1, 2 * grid.height, 2 * grid.width] for grid in grids]),
        None,
        torch.ones(1, len(ids), dtype=torch.int64),
    )
    ours = rope_positions(ids, image, grids)
    assert np.array_equal(ours.axes, axes[:, 0].numpy())
    assert ours.delta == delta.item()
    for wrong in (grids[:1], (ImageGrid(3, 3), ImageGrid(1, 1)), (*grids, grids[0])):
        with pytest.raises(ValueError, match="image tokens"):
            rope_positions(ids, image, wrong)


class Opened:
    """A pickle that would run code of its author's."""

    def __reduce__(self) -> Any:
        return (print, ("this must not run",))


def broken(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        torch.save(change(torch.load(path, weights_only=True)), path)

    return write


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "without its speakers"),
        (lambda path: path.write_bytes(pickle.dumps({"Ethan": Opened()})), "can be read safely"),
        (lambda path: path.write_bytes(b"x" * 100), "can be read safely"),
        (lambda path: path.write_bytes(b"x" * (65 * 2**20)), "at most 67108864"),
        (broken(lambda known: {}), "must hold a mapping of names"),
        (broken(lambda known: {1: known["Ethan"]}), "speaker 1: a name must be a text"),
        (broken(lambda known: {"Ethan": {"cond": known["Ethan"]["cond"]}}), "lacks bos_token, ref_mel"),
        (broken(lambda known: {"Ethan": {**known["Ethan"], "bos_token": 10**6}}), "an id below 384, not 1000000"),
        (broken(lambda known: {"Ethan": {**known["Ethan"], "cond": torch.zeros(1, 5)}}), "cond has 5 numbers, not 12"),
        (broken(lambda known: {"Ethan": {**known["Ethan"], "cond": "x"}}), "cond must be a tensor"),
        (
            broken(lambda known: {"Ethan": {**known["Ethan"], "ref_mel": torch.zeros(1, 4, 20)}}),
            r"ref_mel has shape \[1, 4, 20\], not \[over 4, 20\]",
        ),
        (
            broken(lambda known: {"Ethan": {**known["Ethan"], "ref_mel": torch.full((1, 9, 20), torch.nan)}}),
            "ref_mel holds NaN",
        ),
    ],
)
def test_speakers_are_checked(
    damage: Callable[[Path], None], says: str, tiny25: Path, upstream25: Any, tmp_path: Path, capfd: Any
) -> None:
    shutil.copy(tiny25 / SPEAKER_FILE, tmp_path)
    assert load_speakers(str(tmp_path), tmp_path, upstream25.config).names == ("Chelsie", "Ethan")
    damage(tmp_path / SPEAKER_FILE)
    with pytest.raises(ConfigError, match=says):
        load_speakers(str(tmp_path), tmp_path, upstream25.config)
    assert "this must not run" not in capfd.readouterr().out


async def decoded(codec: CodecEngine, codes: list[int], seed: int = 1, voice: str | None = None) -> Rows:
    async def source() -> AsyncIterator[CodeFrameChunk]:
        for position, code in enumerate(codes):
            yield CodeFrameChunk(position, np.array([[code]]))

    outputs = [output async for output in codec.generate(Request("r", seed=seed, voice=voice), {"talker": source()})]
    return np.concatenate([np.zeros(0, np.float32), *(o.samples for o in outputs if isinstance(o, AudioChunk))])


async def test_the_codec_alone(tiny25: Path) -> None:
    """C28, C38: seeds and voices are heard, no codes are no sound, and what cannot be decoded fails by itself."""
    options = Token2WavOptions()
    codec = CodecEngine(
        EngineContext(TOKEN2WAV, str(tiny25), Qwen2_5OmniToken2Wav, options, progress=lambda line: None)
    )
    await codec.start()
    try:
        one = await decoded(codec, [1, 2, 3])
        assert np.array_equal(one, await decoded(codec, [1, 2, 3], voice="chelsie"))
        others = [await decoded(codec, [1, 2, 4]), await decoded(codec, [1, 2, 3], 2)]
        others.append(await decoded(codec, [1, 2, 3], voice="Ethan"))
        assert all(np.abs(one - other).max() > 1e-3 for other in others)
        assert len(await decoded(codec, [])) == 0
        assert len(await decoded(codec, [0])) == 480
        with pytest.raises(StageFailedError, match=f"code {CODES + 2} is not in a codebook of {CODES + 2}"):
            await decoded(codec, [1, CODES + 2])
        with pytest.raises(StageFailedError, match="2049 codes are more than the 2048"):
            await decoded(codec, [0] * 2049)
        with pytest.raises(InvalidRequestError, match="unknown voice 'Zoe'; this model has Chelsie, Ethan"):
            await decoded(codec, [1], voice="Zoe")
        model: Any = codec._codec
        with torch.inference_mode():
            model._module.code2wav_bigvgan_model.conv_post.weight[0, 0, 0] = torch.nan
        with pytest.raises(NonFiniteAudioError):
            await decoded(codec, [1])
    finally:
        await codec.stop()
    with pytest.raises(ValueError, match="chunk_frames has no meaning here"):
        Token2WavOptions(chunk_frames=(4,))


async def test_draws_depend_on_the_seed_alone(tiny25: Path) -> None:
    """Alone, among others, and after a death: the same codes; never the start code, nor one that has no sound."""
    options = TalkerOptions(max_num_seqs=4, max_model_len=256, threads=1, dtype="float32", deterministic=True)
    talker = AREngine(EngineContext(TALKER, str(tiny25), Qwen2_5OmniTalker, options, progress=lambda line: None))
    noise = np.random.default_rng(0).standard_normal((20, HIDDEN)).astype(np.float32)
    sampling = SamplingParams(temperature=2.0, top_k=80, top_p=1.0, repetition_penalty=1.05, max_tokens=40)

    async def spoken(seed: int, resume: Resume | None = None, voice: str | None = None) -> NDArray[np.int64]:
        async def source() -> AsyncIterator[Any]:
            yield TalkerPrompt(tuple(range(12)), noise[:12], voice)
            for row in noise[12:]:
                yield TalkerRows(row[None])

        request = Request("r", seed=seed, voice=voice, sampling=sampling)
        chunks = [o async for o in talker.generate(request, {"thinker": source()}, resume)]
        return np.concatenate([chunk.frames for chunk in chunks if isinstance(chunk, CodeFrameChunk)])

    await talker.start()
    try:
        alone = [await spoken(seed) for seed in (1, 2)]
        crowd = await asyncio.gather(*(spoken(seed) for seed in (5, 1, 2, 7)))
        assert np.array_equal(crowd[1], alone[0])
        assert np.array_equal(crowd[2], alone[1])
        assert not np.array_equal(*alone[:2])
        assert np.array_equal(await spoken(1, Resume(frames=alone[0][:5])), alone[0])
        assert all(codes.max() < CODES + 2 for codes in crowd)
        with pytest.raises(InvalidRequestError, match="unknown voice 'Zoe'; this model has Chelsie, Ethan"):
            await spoken(1, voice="Zoe")
    finally:
        await talker.stop()


async def fed(chunks: list[Any]) -> list[Any]:
    async def source() -> AsyncIterator[Any]:
        for chunk in chunks:
            yield chunk

    return [item async for item in talker_inputs(Request("r", seed=1, voice="Ethan"), source())]


def row(value: float, position: int) -> LatentChunk:
    return LatentChunk(position, np.full((1, 2), value, np.float32), segment=1)


async def test_only_what_is_shown_and_meant_to_be_heard_is_spoken() -> None:
    """C40: rows wait for their token's text, which a stop string may swallow; markup and tool calls are not spoken."""
    asked = PromptChunk(0, (7, 8), rows=2, silent=frozenset({90}), silent_spans=((91, 92),))
    prompt = LatentChunk(0, np.zeros((2, 2), np.float32), ends_segment=True)
    answer = [
        TextChunk(0, "a", (1,)),
        row(1, 2),
        row(2, 3),
        TextChunk(1, "b<tool_call>x", (90, 91)),
        row(3, 4),
        row(4, 5),
        TextChunk(3, "</tool_call>c", (3, 92, 4)),
        row(5, 6),
        row(6, 7),
        row(7, 8),  # its text never comes: it is part of a stop string
    ]
    first, *rows = await fed([asked, prompt, *answer])
    assert (first.prompt_ids, first.speaker, first.rows.shape) == ((7, 8), "Ethan", (2, 2))
    assert np.concatenate([item.rows for item in rows])[:, 0].tolist() == [1, 6]
    for wrong, says in (
        ([prompt], "before the prompt"),
        ([asked, row(1, 2)], "did not arrive"),
        ([asked, prompt, row(1, 3)], "row 3 of the thinker came where 2 was due"),
        ([asked, prompt, TextChunk(1, "a", (1,))], "token 1 came where 0 was due"),
    ):
        with pytest.raises(StageFailedError, match=says):
            await fed(wrong)
