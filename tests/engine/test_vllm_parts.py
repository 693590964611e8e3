"""What of the vLLM engine needs no vLLM: options, the words of its failures, the guard of its processes."""

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from pydantic import ValidationError

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine import vllm_rehearsal
from omni_ray.engine.collector import pausing, uncollected
from omni_ray.engine.text_answer import TextAnswer
from omni_ray.engine.types import TextChunk
from omni_ray.engine.vllm_compat import RowKeeper
from omni_ray.engine.vllm_errors import ErrorLog, root_cause
from omni_ray.engine.vllm_model import rows_at
from omni_ray.engine.vllm_options import RESERVED, VLLMOptions
from omni_ray.engine.vllm_rehearsal import DROPPED, OneLayer
from omni_ray.engine.vllm_warm_up import TUNED, RandomPrompts, warm_up_lengths, warm_up_steps
from omni_ray.errors import ConfigError, StageFailedError
from omni_ray.registry import engine_entry, load_pipeline
from omni_ray.serve.resolve import AppArgs, resolve

EURO = "€".encode()


def spelled(token: int) -> bytes:
    """Tokens 0 to 127 are characters, 200 to 202 the bytes of a euro sign, all others special."""
    return bytes([token]) if token < 128 else EURO[token - 200 : token - 199] if 200 <= token < 203 else b""


def answer(tokens: list[int], limit: int = 100, **sampling: Any) -> tuple[list[TextChunk], TextAnswer]:
    made = TextAnswer(spelled, frozenset({7, 250}), SamplingParams(**sampling), limit)
    chunks = []
    for token in tokens:
        if made.reason is None:
            chunks += made.add(token)
    return chunks, made


def test_an_answer_ends_at_a_stop_token_which_is_in_no_chunk():
    chunks, made = answer([ord("a"), 250, ord("b")])
    assert chunks == [TextChunk(0, "a", (ord("a"),))]
    assert (made.reason, made.count) == ("stop", 2)
    chunks, made = answer([ord("a"), 250, ord("b")], ignore_eos=True)
    assert "".join(chunk.text for chunk in chunks) == "ab"
    assert (made.reason, made.count) == (None, 3)


def test_an_answer_ends_before_a_stop_string_that_several_tokens_spell():
    chunks, made = answer([*b"one st", *b"op two"], stop=("stop",))
    assert "".join(chunk.text for chunk in chunks) == "one "
    assert [token for chunk in chunks for token in chunk.token_ids] == [*b"one "]
    assert (made.reason, made.count) == ("stop", 8)


def test_an_answer_is_cut_at_its_limit_with_what_was_held_back():
    chunks, made = answer([*b"one st", *b"op"], limit=6, stop=("stop",))
    assert "".join(chunk.text for chunk in chunks) == "one st"
    assert (made.reason, made.count) == ("length", 6)


def test_a_character_waits_for_its_last_byte():
    chunks, _ = answer([ord("1"), 200, 201, 202])
    assert chunks == [TextChunk(0, "1", (ord("1"),)), TextChunk(1, "€", (200, 201, 202))]


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_arguments_that_we_rest_on_may_not_be_set(name: str):
    with pytest.raises(ValidationError, match=f"engine_args.{name}: may not be set here"):
        VLLMOptions(engine_args={name: 1})


def test_an_option_is_not_hidden_among_further_arguments():
    with pytest.raises(ValidationError, match=r"engine_args.dtype: is an option of its own"):
        VLLMOptions(engine_args={"dtype": "float16"})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "rehearse: needs kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 2**30, "tensor_parallel_size": 2}, "rehearse: only for tensor_parallel_size 1"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(options: dict[str, Any], problem: str):
    with pytest.raises(ValidationError, match=problem):
        VLLMOptions(rehearse=True, **options)


def test_a_rehearsed_copy_keeps_what_chooses_kernels_and_drops_what_wants_all_layers():
    arguments = {
        "model": "/m",
        "dtype": "bfloat16",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "block_size": 16,
    }
    whole = {**dict.fromkeys(DROPPED, "x"), "load_format": "auto", "kv_cache_memory_bytes": 26 * 10**9, **arguments}
    copy = OneLayer.of(whole, SamplingParams(top_k=20))
    assert {name: copy.arguments[name] for name in arguments} == arguments
    assert not copy.arguments.keys() & set(DROPPED)
    assert (copy.arguments["load_format"], copy.arguments["kv_cache_memory_bytes"]) == ("dummy", 2**30)
    assert OneLayer.model_validate_json(copy.model_dump_json()) == copy


def test_a_rehearsal_that_dies_before_it_is_told_what_to_compute_ends_no_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(vllm_rehearsal, "CODE", "import sys; sys.exit('no room on the GPU')")
    arguments = {"model": "m" * 10_000_000, "kv_cache_memory_bytes": 2**30}  # more than a pipe takes unread
    with vllm_rehearsal.rehearsing("thinker", OneLayer.of(arguments, SamplingParams()), {}) as process:
        process.wait(20)
    assert [record.getMessage() for record in caplog.records] == [
        "stage thinker: computing one layer failed (1): no room on the GPU"
    ]


def config(num_gpus: float | None = None, **engine: Any) -> dict[str, Any]:
    actor = {} if num_gpus is None else {"num_gpus": num_gpus}
    return {"stages": {"thinker": {"deployment": {"ray_actor_options": actor}, "engine": {"name": "vllm", **engine}}}}


@pytest.mark.parametrize(
    ("num_gpus", "engine", "problem"),
    [
        (1, {"tensor_parallel_size": 2}, "tensor_parallel_size: 2 needs num_gpus: 2, the replica has 1"),
        (2, {}, "tensor_parallel_size: 1 needs num_gpus: 1, the replica has 2"),
        (0.6, {}, "gpu_memory_utilization: must be given, because the replica has only 0.6 of a GPU"),
        (0.6, {"gpu_memory_utilization": 0.7}, "gpu_memory_utilization: 0.7 is more than the 0.6 GPU"),
    ],
)
def test_gpus_and_options_must_fit(num_gpus: float, engine: dict[str, Any], problem: str):
    """C62, C65: before any actor starts."""
    with pytest.raises(ConfigError) as error:
        resolve("qwen3_omni", AppArgs(deploy_config=config(num_gpus, **engine)))
    assert error.value.problems[0].startswith(f"deploy_config: stages.thinker.engine.{problem}")


def test_tensor_parallelism_places_the_replica():
    """One bundle with all GPUs: the group of a replica is where its workers run."""
    app = resolve("qwen3_omni", AppArgs(deploy_config=config(tensor_parallel_size=2)))
    thinker = next(spec for spec in app.stages if spec.stage == "thinker")
    (derived,) = [d.derived for d in app.deployments if d.name == "thinker"]
    assert derived.num_gpus == 2
    assert derived.serve["placement_group_bundles"] == [{"CPU": 0.1, "GPU": 2.0}]
    assert (thinker.engine_path, thinker.model_arch) == (
        "omni_ray.engine.vllm_engine:VLLMEngine",
        "Qwen3OmniThinkerVLLM",
    )


def test_every_pipeline_says_what_vllm_computes_of_a_stage():
    for name in ("qwen3_omni", "voice_chat"):
        stage = load_pipeline(name).stage("thinker")
        assert engine_entry(stage, "vllm")[1].options == "omni_ray.engine.vllm_options:VLLMOptions"
        assert stage.arch_for("vllm") != stage.arch_for("ar") == stage.model_arch


def test_a_misspelt_option_is_named_before_anything_starts():
    with pytest.raises(ConfigError, match=r"engine.gpu_memory_utilisation: unknown key .* 'gpu_memory_utilization'"):
        resolve("qwen3_omni", AppArgs(deploy_config=config(gpu_memory_utilisation=0.5)))


class Runner:
    """What ``RowKeeper`` reads of vLLM's runner: rows of a batch, by request."""

    def __init__(self, requests: dict[str, tuple[list[int], int, int]]) -> None:
        """``requests``: by id, the prompt, how many of its tokens were computed before, how many are in the pass."""
        self.input_batch = SimpleNamespace(
            req_ids=list(requests),
            num_computed_tokens_cpu=np.array([done for _, done, _ in requests.values()]),
            num_prompt_tokens=np.array([len(prompt) for prompt, _, _ in requests.values()]),
            token_ids_cpu=np.zeros((len(requests), 32), np.int64),
        )
        for i, (prompt, _, _) in enumerate(requests.values()):
            self.input_batch.token_ids_cpu[i, : len(prompt)] = prompt
        ends = np.cumsum([0, *(count for _, _, count in requests.values())])
        self.query_start_loc = SimpleNamespace(np=ends)


class Layer(torch.nn.Module):
    """A decoder layer that returns hidden states and a residual, as vLLM's do."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, 10 * hidden


MEDIA = 99


def test_rows_of_media_are_kept_by_request_and_position():
    """Chunked prompts, decode rows beside them, a preempted request that is computed again, and ids alike."""
    layer = Layer()
    keeper = RowKeeper(layer, width=2, longest=16, dtype=torch.float32, media=(MEDIA,))
    long, short = [1, MEDIA, MEDIA, 2, MEDIA, 3], [MEDIA, 1]

    def compute(first: float, **requests: tuple[list[int], int, int]) -> None:
        named = {f"{name.replace('_', '-')}-{'0' * 8}": batch for name, batch in requests.items()}
        runner = Runner(named)
        keeper.attach(runner)
        count = int(runner.query_start_loc.np[-1])
        layer((first + torch.arange(count, dtype=torch.float32))[:, None].repeat(1, 2))
        keeper.collect()

    compute(0, a=(long, 0, 2), a_1=(short, 0, 2))
    compute(100, b=([1, 2], 2, 1), a=(long, 2, 4))
    kept = keeper.fetch("a")
    assert kept is not None
    assert kept[0].tolist() == [1, 2, 4]
    assert kept[1][:, 0].tolist() == [11 * 1, 11 * 101, 11 * 103]
    assert keeper.fetch("a") is None
    assert keeper.fetch("b") is None
    other = keeper.fetch("a-1")
    assert other is not None
    assert (other[0].tolist(), other[1][:, 0].tolist()) == ([0], [22])
    compute(0, c=(long, 0, 5))
    compute(200, c=(long, 0, 6))
    again = keeper.fetch("c")
    assert again is not None
    values = again[1].numpy().ravel()
    assert rows_at(again[0], values, np.array([1, 2, 4]))[:, 1].tolist() == [11 * 201, 11 * 202, 11 * 204]


def test_a_row_that_was_not_computed_is_an_error_and_never_zeros():
    with pytest.raises(StageFailedError, match="no hidden rows of 2 of 3 media positions, the first of them 5"):
        rows_at(np.array([4, 9]), np.zeros(4, np.float32), np.array([4, 5, 6]))


def expert_kernel(size: int, experts: int, of_token: int) -> tuple[int, bool, bool, bool]:
    """Which variant of ``fused_moe_kernel`` a step of ``size`` tokens needs, as vLLM 0.26 launches it."""
    tuned = min(TUNED, key=lambda key: abs(key - size))
    block = 16 if size < 192 else 32 if size < 384 else 64 if size < 768 else 128
    unsorted = size * of_token * 4 <= experts
    padded = size * of_token + experts * (block - 1)
    if size * of_token < experts:
        padded = min(padded, size * of_token * block)
    if unsorted or size < block:
        padded = size * of_token * block if unsorted else min(padded, size * of_token * block)
    return tuned, unsorted, size * of_token % 16 == 0, padded % 16 == 0


@pytest.mark.parametrize("most", [4096, 2000])
@pytest.mark.parametrize("graphs", [(), (1, 2, 4, 8, 16, 24, 32, 48, 64), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)])
def test_a_warm_up_leaves_no_size_of_a_step_that_needs_another_kernel(most: int, graphs: tuple[int, ...]):
    """Of Qwen3-Omni's experts; a step that fits a graph is filled up to its size, and graphs are captured before."""
    captured = max(graphs, default=0)
    lengths = warm_up_lengths(most, captured)
    assert len(lengths) <= 40
    assert all(captured < length <= most for length in lengths)
    warm = {expert_kernel(size, 128, 8) for size in (*lengths, *graphs)}
    cold = {size: expert_kernel(size, 128, 8) for size in range(captured + 1, most + 1)}
    assert {size for size, kernel in cold.items() if kernel not in warm} == set()


def test_a_warm_up_samples_as_requests_do_and_shows_no_marks_of_media():
    said = SamplingParams(temperature=0.7, top_k=20, max_tokens=9)
    steps = warm_up_steps([5, 9], 64, said)
    assert [[(prompt.length, prompt.limit) for prompt in step] for step in steps[:2]] == [[(5, 1)], [(9, 1)]]
    ways = [(step[0].sampling.temperature, step[0].sampling.top_p, len(step)) for step in steps[2:]]
    assert ways == [(0.7, None, 16), (0, 1, 16), (1, 1, 16), (1, 0.9, 16)]
    assert all(prompt.sampling.ignore_eos and prompt.sampling.top_k == 20 for step in steps for prompt in step)
    assert warm_up_steps([5], 0, said) == [steps[0]]
    prompts = RandomPrompts(spelled, 203)
    ids = prompts.ids(5000)
    assert set(ids) == {*range(128), 200, 201, 202}
    assert prompts.ids(5000) != ids


def test_another_kind_of_runner_is_refused():
    keeper = RowKeeper(Layer(), width=2, longest=4, dtype=torch.float32, media=(MEDIA,))
    runner = Runner({"a": ([1], 0, 1)})
    runner.input_batch.num_computed_tokens_cpu = np.zeros((1, 2))
    with pytest.raises(RuntimeError, match="otherwise than in the tested versions"):
        keeper.attach(runner)


RECORD = """EngineCore failed to start.
Traceback (most recent call last):
  File "core.py", line 1, in run
    self.start()
KeyError: 'a'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "core.py", line 9, in start
    raise ValueError(
torch.cuda.OutOfMemoryError: CUDA out of memory.
Tried to allocate 2 GiB."""


def test_the_cause_is_the_last_exception_without_its_traceback():
    assert root_cause(RECORD) == "torch.cuda.OutOfMemoryError: CUDA out of memory.\nTried to allocate 2 GiB."
    assert root_cause("something went wrong\nmore") == "something went wrong"


def test_errors_of_other_processes_are_read_from_a_file():
    """The first one since the start counts: later ones follow from it."""
    plain = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {},
        "handlers": {"vllm": {"class": "logging.NullHandler"}},
        "loggers": {"vllm": {"handlers": ["vllm"], "propagate": False}},
    }
    log = ErrorLog(plain)
    code = (
        "import json, logging, logging.config, sys\n"
        "logging.config.dictConfig(json.load(open(sys.argv[1])))\n"
        "logger = logging.getLogger('vllm.core')\n"
        "for word in sys.argv[2:]:\n"
        "    try:\n        raise ValueError(word)\n    except ValueError:\n        logger.exception('failed')\n"
        "logger.warning('only a warning')\n"
    )

    def fail(*words: str) -> None:
        subprocess.run([sys.executable, "-c", code, str(log.config), *words], check=True)

    assert log.first() is None
    fail("one", "two")
    assert log.first() == "ValueError: one"
    log.skip()
    assert log.first() is None
    fail("three", "four")
    assert log.first() == "ValueError: three"
    directory = log.config.parent
    log.close()
    assert not directory.exists()


def test_a_process_collects_nothing_from_its_logging_to_its_plugin():
    """What of it vLLM does itself: tests/engine/test_vllm.py."""
    plain = {"version": 1, "handlers": {"vllm": {"class": "logging.NullHandler"}}}
    code = (
        "import gc, json, logging.config, sys\n"
        "logging.config.dictConfig(json.loads(sys.argv[1]))\n"
        "from omni_ray.engine.collector import resume, uncollected\n"
        "said = [gc.isenabled()]\n"
        "with uncollected():\n    said.append(gc.isenabled())\n"
        "said.append(gc.isenabled())\n"
        "resume()\n"
        "said += [gc.isenabled(), gc.get_freeze_count() > 1000]\n"
        "gc.unfreeze()\n"
        "resume()\n"
        "print(json.dumps([*said, gc.isenabled(), gc.get_freeze_count()]))\n"
    )
    command = [sys.executable, "-c", code, json.dumps(pausing(plain))]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(ran.stdout) == [False, False, False, True, True, True, 0]
    assert "filters" not in plain


def test_bodies_that_collect_nothing_nest_and_fail():
    assert gc.isenabled()
    with uncollected():
        with pytest.raises(ValueError), uncollected():
            raise ValueError
        assert not gc.isenabled()
    assert gc.isenabled()


OWNER = """
import multiprocessing, subprocess, sys, time
from omni_ray.engine.child_guard import ChildGuard

def forever():
    subprocess.run(["sleep", "60"])

if __name__ == "__main__":
    guard = ChildGuard()
    with guard:
        for _ in range(2):
            multiprocessing.get_context("spawn").Process(target=forever, daemon=True).start()
        if sys.argv[1] == "starting":
            time.sleep(0.6)
            print(*[child.pid for child in multiprocessing.active_children()], flush=True)
            time.sleep(60)
    print(*guard.children(), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("when", ["starting", "started"])
def test_children_die_with_an_owner_that_is_killed(tmp_path: Path, when: str):
    """An orphaned engine would hold its GPU's memory for ever; also one that was still loading, and its children."""
    (tmp_path / "owner.py").write_text(OWNER)
    root = str(Path(__file__).parents[2])
    owner = subprocess.Popen(
        [sys.executable, str(tmp_path / "owner.py"), when],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert owner.stdout is not None
    children = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert len(children) == 2
    deadline = time.monotonic() + 20
    while len(grandchildren := [each for child in children for each in child.children()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    _, alive = psutil.wait_procs([*children, *grandchildren], timeout=20)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


def test_a_guard_that_was_released_kills_nobody():
    from omni_ray.engine.child_guard import ChildGuard

    guard = ChildGuard()
    with guard:
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
        child.start()
    assert guard.children() == [child.pid]
    child.terminate()
    guard.release(5)
    assert guard.children() == []


def test_a_guard_kills_what_it_is_told_to_and_what_comes_later():
    from omni_ray.engine.child_guard import ChildGuard

    stranger = subprocess.Popen(["sleep", "60"])  # as a rank: another process's child
    guard = ChildGuard()
    guard.add([stranger.pid])
    guard.kill()
    assert stranger.wait(20) == -signal.SIGKILL
    assert guard.killed
    with guard:
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
        child.start()
    child.join(5)
    assert child.exitcode == -signal.SIGKILL
    guard.release(5)


@pytest.mark.parametrize("stopped", [False, True])
def test_one_dead_rank_ends_all_unless_the_engine_is_stopping(stopped: bool):
    from omni_ray.engine.child_guard import ChildGuard
    from omni_ray.engine.vllm_ranks import LAST_WORDS_S, RankWatch

    ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    guard = ChildGuard()
    pids = [rank.pid for rank in ranks]
    guard.add(pids)
    watch = RankWatch(pids, guard)
    if stopped:
        watch.stop()
    ranks[1].kill()
    try:
        if stopped:
            with pytest.raises(subprocess.TimeoutExpired):
                ranks[0].wait(LAST_WORDS_S + 0.3)
        else:
            assert ranks[0].wait(20) == -signal.SIGKILL
            watch.stop()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        with guard:
            guard.release(5)
