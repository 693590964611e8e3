"""What a model must offer to be computed by the autoregressive engine. Knows no engine.

Two kinds fit: ``ARModel`` draws text tokens (the engine samples from its logits), ``CodecLM`` makes code frames (talker
step, code predictor and sampling are one step of the model). Both share ``SlotModel``: how a prompt gets into a slot.

**Prompts.** ``encode`` turns a typed input into a prepared prompt: anything with a length and slices. A list of token
ids is one; a model whose prompt is embeddings and rope positions makes a class of its own. The engine cuts it at
multiples of ``prefill_chunk`` and hands over the pieces; it never looks inside.

**Self-test.** With ``deterministic: true`` the engine computes ``probes()`` at start-up, alone and among each other,
and refuses to start if any number differs (``ar_selftest``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from torch import Tensor

from omni_ray.engine.base import EngineContext
from omni_ray.engine.types import Chunk, Request

PREFILL_CHUNK: Final = 128
"""See ``SlotModel.prefill_chunk``; of a model that says nothing else, and of known answers taken over."""


class Prepared(Protocol):
    """A prompt as its model computes it: a number of positions, and pieces of it by position."""

    def __len__(self) -> int:
        """Positions, at least one."""

    def __getitem__(self, piece: slice, /) -> Any:
        """Positions ``piece.start`` to ``piece.stop``, in whatever form ``prefill`` takes."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A request of the self-test: a typed input as ``encode`` takes it, and what is fed while it runs."""

    prompt: Any
    feeds: tuple[Any, ...] = ()


class SlotModel(ABC):
    """The model side: built as ``model_cls(context)``; what is below runs on the engine's one thread.

    One exception: once the model is loaded, ``encode`` runs on another thread if ``encodes_apart``, while the first one
    steps. It may be long: it reads media and computes what towers make of them.

    A slot is a row of the static KV cache, 0 to ``max_num_seqs - 1``. The engine hands out the lowest free one and
    never gives a slot to two requests at once.
    """

    encodes_apart: ClassVar[bool] = False

    def __init__(self, context: EngineContext) -> None:
        self.context = context

    @abstractmethod
    def load(self) -> None:
        """Load weights, set torch's threads, warm up; blocking. Raises on any missing file or tensor."""

    @abstractmethod
    def encode(self, prompt: Any) -> Prepared:
        """Prepare one typed input, as this stage's processor yields it. Never called twice at once.

        Raises:
            InvalidRequestError: the request asks for what this checkpoint does not have.
        """

    def begin(self, slot: int, prompt: Any) -> int:
        """Take ``slot`` for a prepared prompt; how many first positions (less than all) the slot already holds."""
        return 0

    @property
    def prefill_chunk(self) -> int:
        """Prompt positions computed between two decode steps; pieces are cut at multiples of it. Asked once loaded."""
        return PREFILL_CHUNK

    @abstractmethod
    def release(self, slot: int) -> None:
        """The request in ``slot`` is over; called for every ``begin``, also after an error."""

    def stop(self) -> None:  # noqa: B027 most models hold no thread
        """No call comes any more, loaded or not: end what runs in the background; blocking."""

    def kv_bytes(self) -> int:
        """Bytes of the KV cache; like ``encoder_bytes``, asked from another thread at any time after ``load``."""
        return 0

    def encoder_bytes(self) -> int:
        """Bytes of the media features that prompts in slots hold."""
        return 0

    def probes(self) -> Sequence[Probe]:
        """Requests for the self-test, of different lengths; none means that there is no self-test."""
        return ()


class ARModel(SlotModel):
    """A model whose step ends in logits of a text vocabulary.

    Attributes:
        stop_ids: tokens that end an answer: the union of all sources in the checkpoint, set by ``load``. None may be
            assumed: id 0 is an ordinary token in many vocabularies (cases.md C24).
        max_positions: of prompt and answer together, if the model has fewer than ``max_model_len``; set by ``load``.
    """

    encodes_apart = True
    stop_ids: frozenset[int]
    max_positions: int | None = None

    def penalised(self, prompt: Any) -> Sequence[int]:
        """The prompt's token ids, for the repetition penalty. Prepared prompts that are no list of ids override it."""
        return list(prompt)

    @abstractmethod
    def detokenize(self, token_id: int) -> bytes:
        """UTF-8 bytes of a token, possibly a part of a character; empty for special tokens."""

    def detokenizer(self) -> Callable[[int], bytes]:
        """What turns one answer's tokens, given in order, into bytes: where a token's text depends on those before."""
        return self.detokenize

    @abstractmethod
    def prefill(self, slot: int, ids: Any, start: int) -> Tensor:
        """Compute a piece ``ids`` of the prepared prompt, at positions ``start ..``.

        Returns:
            float32 logits [vocabulary] of the piece's last position.
        """

    def follow(self, slot: int, ids: Sequence[int], start: int) -> None:
        """Compute tokens of an answer that began elsewhere, many at once, at positions ``start ..`` behind the prompt.

        Prepared prompts that are no list of ids override it.
        """
        self.prefill(slot, list(ids), start)

    def prompt_outputs(self, slot: int) -> Sequence[Chunk]:
        """What the stage gives out besides text once the prompt is computed (hidden rows, say); before any token."""
        return ()

    @abstractmethod
    def step(self, slots: Sequence[int], last_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Compute one token per slot: ``last_ids`` at ``positions``; equal calls must be repeatable.

        Args:
            slots: ascending.
            last_ids: the token drawn last in each slot.
            positions: where it stands in its sequence, the prompt included.

        Returns:
            float32 logits [len(slots), vocabulary].
        """


@dataclass(frozen=True, slots=True)
class FrameStep:
    """What one step of a ``CodecLM`` gives.

    Attributes:
        frames: int64 [n, codebooks].
        ended: per row, whether the model said its stop code: then there is no frame, and the row is over.
        finite: per row, whether its logits were numbers.
        evidence: float [n, ...]: what the codes were drawn from, compared bit for bit by the self-test.
    """

    frames: Tensor
    ended: Sequence[bool]
    finite: Sequence[bool]
    evidence: Tensor


class CodecLM(SlotModel):
    """A model whose step is a whole code frame, fed while it runs.

    Step k (0, 1, ...) needs unit k of the feed and gives frame k. The engine makes no step before the unit has come;
    when the feed has ended, further steps need none (the model knows what then stands in the units' place). A prompt
    may bring units along (``units``), up to all of them. If there is none at the feed's end, there is nothing to say:
    no step is made.

    Attributes:
        frame_rate: frames per second of sound, set by ``load``.
    """

    frame_rate: float

    @property
    def ahead(self) -> bool:
        """Whether ``launch`` returns before the frame is computed, so that the next may be launched meanwhile."""
        return False

    def launch(self, slots: Sequence[int], steps: Sequence[int]) -> Callable[[], FrameStep]:
        """Start a step as ``step`` would make it; calling the result waits for it. At most two are under way.

        A row may be launched again before its frame is known: whatever it draws, the next step starts from it.
        """
        done = self.step(slots, steps)
        return lambda: done

    @abstractmethod
    def prefill(self, slot: int, piece: Any, start: int) -> None:
        """Compute a piece of the prepared prompt, at positions ``start ..``."""

    def units(self, prompt: Any) -> int:
        """How many units a prepared prompt brings along: for a model whose whole text is in its prompt, the text's."""
        return 0

    @abstractmethod
    def sample_as(self, slot: int, request: Request) -> None:
        """How the slot draws: temperature (0 is greedy), top_k, top_p, repetition penalty, seed. Before any step."""

    @abstractmethod
    def feed(self, slot: int, item: Any) -> int:
        """Take what arrived for the slot; how many units it was."""

    @abstractmethod
    def end_feed(self, slot: int) -> None:
        """No unit comes any more."""

    @abstractmethod
    def follow(self, slot: int, frames: Tensor, start: int) -> None:
        """Take steps whose frames are known, many at once: an answer that began elsewhere goes on here.

        Args:
            slot: with the units of all these steps there, or its feed ended.
            frames: int64 [n, codebooks], of steps ``start ..``.
            start: number of the first.
        """

    @abstractmethod
    def step(self, slots: Sequence[int], steps: Sequence[int]) -> FrameStep:
        """Compute frame ``steps[i]`` of every slot. A call that raises leaves every slot as it was.

        Args:
            slots: ascending; each with its unit there, or its feed ended.
            steps: number of the frame.
        """
