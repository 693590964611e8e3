"""``any_thinker`` through real Ray Serve over HTTP, on a checkpoint that no pipeline is made for."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from omni_ray.models.any_thinker.checkpoint import make_tiny
from omni_ray.selection import select
from tests.conftest import Serving, wait_until

TOKENS = 20
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who are you, then?"}]
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)


def upstream(model: Path) -> tuple[str, int]:
    """Greedy text of transformers' own ``generate``, and how long its prompt is."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    asked = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids = net.generate(**asked, do_sample=False, max_new_tokens=TOKENS)
    length = asked["input_ids"].shape[1]
    return tokenizer.decode(ids[0, length:], skip_special_tokens=True), length


def deltas(body: str) -> tuple[list[str], list[str | None], dict[str, Any]]:
    """Texts, finish reasons and the usage of a chat's events."""
    assert body.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in body.split("\n\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    texts = [choice["delta"].get("content") or "" for choice in choices]
    return texts, [c["finish_reason"] for c in choices if c["finish_reason"]], events[-1]["usage"]


@pytest.mark.weights
async def test_a_checkpoint_nobody_knows_answers_as_upstream_does(serving: Serving, tmp_path: Path):
    make_tiny(tmp_path / "somebodys_model")
    model = tmp_path / "somebodys_model"
    chosen = select(str(model))
    assert "LlamaForCausalLM, which has no pipeline of its own" in chosen.reason
    engine = {"engine": {"dtype": "float32", "threads": 1, "max_num_seqs": 2}}
    served = serving(chosen.pipeline, {"model": str(model), "stages": {"thinker": engine}})
    expected, length = upstream(model)
    greedy = {"model": "any_thinker", "messages": MESSAGES, "temperature": 0, "max_tokens": TOKENS}
    usage = {"prompt_tokens": length, "completion_tokens": TOKENS, "total_tokens": length + TOKENS}
    async with served.async_client() as client:

        async def ask(**fields: Any) -> httpx.Response:
            return await client.post("/v1/chat/completions", json={**greedy, **fields})

        whole, *others = await asyncio.gather(*(ask() for _ in range(5)))
        answer = whole.json()
        assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == (
            expected,
            "length",
        )
        assert answer["usage"].items() >= usage.items()
        assert {other.json()["choices"][0]["message"]["content"] for other in others} == {expected}

        streamed = await ask(stream=True, stream_options={"include_usage": True})
        texts, reasons, counted = deltas(streamed.text)
        assert ("".join(texts), reasons) == (expected, ["length"])
        assert len([text for text in texts if text]) > 1
        assert counted.items() >= usage.items()

        stopped = (await ask(stop=[expected[7:9]])).json()["choices"][0]
        assert stopped["message"]["content"] == expected[: expected.index(expected[7:9])]
        assert stopped["finish_reason"] == "stop"

        hot = {"temperature": 1.0, "seed": 7}
        drawn = [(await ask(**hot)).json()["choices"][0]["message"]["content"] for _ in range(2)]
        other = (await ask(**hot | {"seed": 8})).json()["choices"][0]["message"]["content"]
        assert drawn[0] == drawn[1] != other

        seen = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
        refused = await ask(messages=[{"role": "user", "content": seen}])
        assert refused.status_code == 400
        assert "any_thinker" in refused.json()["error"]["message"]

        async with client.stream(
            "POST", "/v1/chat/completions", json={**greedy, "max_tokens": 900, "stream": True}
        ) as leaving:
            await anext(leaving.aiter_text())
    wait_until(lambda: served.working() == {"thinker": 0}, 20)
