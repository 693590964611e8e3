"""Hidden rows of a prompt's media out of vLLM: the only module that reads what vLLM does not publish.

vLLM gives out no hidden states. An out-of-tree model class (``RowKeeper`` says what it does) copies the rows of one
layer into a buffer inside the forward pass, so compiled and captured passes do it too; and after each pass, in
``compute_logits``, which is never captured, those of media positions are kept by request. ``RowTap``, vLLM's
``worker_extension_cls``, hands them out.

Read of vLLM 0.26 and 0.32, and the same in both: ``GPUModelRunner`` of the first kind (``vllm/v1/worker``), its
``input_batch`` (``req_ids``, ``num_computed_tokens_cpu``, ``num_prompt_tokens``, ``token_ids_cpu``) and its
``query_start_loc.np``, all describing the running pass while ``compute_logits`` is called; and that a request's id in
the worker is the one given to ``generate`` with a hyphen and eight characters behind it. ``attach`` checks the names.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from omni_ray.engine.vllm_model import rows_at
from omni_ray.engine.vllm_ranks import RankPid
from omni_ray.errors import StageFailedError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

RUNNER: Final = "0"
"""Of ``VLLM_USE_V2_MODEL_RUNNER``: the second kind of runner describes its batches otherwise."""

SUFFIX: Final = 9
"""Characters that vLLM puts behind a request's id."""

MOST_REQUESTS: Final = 4096
"""Requests whose rows are kept at once; each is fetched or dropped by its owner, so this is never reached."""

Kept = tuple[NDArray[np.int64], Tensor]
"""Positions, and a row of each."""


class RowKeeper:
    """Keeps rows in the process that computes the model; the model's class calls ``collect`` after each pass."""

    def __init__(self, layer: nn.Module, width: int, longest: int, dtype: torch.dtype, media: Collection[int]) -> None:
        """Have the outputs of ``layer`` copied.

        Args:
            layer: a decoder layer of vLLM's: it returns hidden states, and the residual that is not yet added to them.
            width: of its output.
            longest: most tokens of one pass.
            dtype: of its output.
            media: token ids of the placeholders whose rows are kept.
        """
        # a buffer of the layer's own: then a compiled pass takes it for one of the model's tensors
        layer.register_buffer("omni_ray_rows", torch.zeros(longest, width, dtype=dtype), persistent=False)
        layer.register_forward_hook(_copy_output)
        self._layer = layer
        self._media = np.fromiter(media, np.int64)
        self._runner: Any = None
        self._kept: OrderedDict[str, list[Kept]] = OrderedDict()

    def attach(self, runner: Any) -> None:
        """Begin to keep rows of the runner's batches.

        Raises:
            RuntimeError: it is not of the kind that this module was written for.
        """
        batch = runner.input_batch
        shapes = (batch.num_computed_tokens_cpu.ndim, batch.num_prompt_tokens.ndim, batch.token_ids_cpu.ndim)
        if not isinstance(batch.req_ids, list) or shapes != (1, 1, 2) or runner.query_start_loc.np.ndim != 1:
            raise RuntimeError(f"{type(runner).__name__} describes its batches otherwise than in the tested versions")
        self._runner = runner

    def collect(self) -> None:
        """Take what the pass that has just run computed of prompts; rows of a position computed again replace it."""
        if self._runner is None:  # still warming up
            return
        batch, starts = self._runner.input_batch, self._runner.query_start_loc.np
        count = len(batch.req_ids)
        # most passes compute no prompt at all, and all requests wait for this one
        for i in np.flatnonzero(batch.num_computed_tokens_cpu[:count] < batch.num_prompt_tokens[:count]).tolist():
            done, first = int(batch.num_computed_tokens_cpu[i]), int(starts[i])
            end = min(done + int(starts[i + 1]) - first, int(batch.num_prompt_tokens[i]))
            places = np.flatnonzero(np.isin(batch.token_ids_cpu[i, done:end], self._media))
            if len(places):
                rows = self._buffer()[torch.from_numpy(first + places).to(self._buffer().device)]
                self._kept.setdefault(batch.req_ids[i], []).append((done + places, rows))
                while len(self._kept) > MOST_REQUESTS:
                    self._kept.popitem(last=False)

    def fetch(self, request: str) -> Kept | None:
        """Hand over and forget the rows of the request that ``generate`` was called with."""
        found = [name for name in self._kept if name[:-SUFFIX] == request]
        pieces = [piece for name in found for piece in self._kept.pop(name)]
        if not pieces:
            return None
        return np.concatenate([places for places, _ in pieces]), torch.cat([rows for _, rows in pieces])

    def _buffer(self) -> Tensor:
        return self._layer.get_buffer("omni_ray_rows")


def _copy_output(layer: nn.Module, _: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Inside the pass: vLLM adds the residual late, so what a layer gives is the sum of two tensors."""
    hidden, residual = output
    layer.get_buffer("omni_ray_rows")[: hidden.shape[0]].copy_(hidden + residual)


class RowTap(RankPid):
    """The ``worker_extension_cls`` of a model whose rows are kept."""

    model_runner: Any
    rank: int

    def omni_ray_attach(self) -> str:
        """Begin to keep rows; the kind of runner they are read from."""
        self._omni_ray_keeper().attach(self.model_runner)
        return type(self.model_runner).__name__

    def omni_ray_fetch(self, request: str) -> tuple[bytes, bytes] | None:
        """A request's positions (int64) and rows (float32), which are forgotten here. All ranks hold the same rows."""
        kept = self._omni_ray_keeper().fetch(request)
        if kept is None or self.rank != 0:
            return None
        return kept[0].astype(np.int64).tobytes(), kept[1].float().cpu().numpy().tobytes()

    def _omni_ray_keeper(self) -> RowKeeper:
        keeper = self.model_runner.get_model().row_keeper
        assert isinstance(keeper, RowKeeper)
        return keeper


class HiddenRows:
    """The stage's end: fetches rows of requests."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm
        self._due: set[str] = set()
        self._dropping: set[asyncio.Task[Any]] = set()

    async def attach(self) -> None:
        """Have the workers begin."""
        await self._llm.collective_rpc("omni_ray_attach")

    def expect(self, request: str) -> None:
        """Rows of this request will be kept, until they are fetched or dropped."""
        self._due.add(request)

    async def fetch(self, request: str, wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows float32 [len(wanted), width] of a request whose prompt is computed.

        Args:
            request: its id, as given to ``generate``.
            wanted: ascending positions.

        Raises:
            StageFailedError: a row is missing.
        """
        self._due.remove(request)
        answers = await self._llm.collective_rpc("omni_ray_fetch", args=(request,))
        found = next((answer for answer in answers if answer is not None), None)
        if found is None:
            raise StageFailedError(f"vLLM kept no hidden rows of {len(wanted)} media positions")
        return rows_at(np.frombuffer(found[0], np.int64), np.frombuffer(found[1], np.float32), wanted)

    def drop(self, request: str) -> None:
        """Forget the rows of a request that is over, unless they were fetched."""
        if request not in self._due:
            return
        self._due.remove(request)
        task = asyncio.ensure_future(self._llm.collective_rpc("omni_ray_fetch", args=(request,)))
        self._dropping.add(task)
        task.add_done_callback(self._dropped)

    def _dropped(self, task: "asyncio.Task[Any]") -> None:
        self._dropping.discard(task)
        if not task.cancelled():
            task.exception()  # dead processes keep nothing
