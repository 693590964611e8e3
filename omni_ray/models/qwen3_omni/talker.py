"""The talker of Qwen3-Omni: text tokens in, code frames [16] out, one frame per step and 12.5 of them a second.

A step is the talker's transformer (``SlotDecoder``) over [last frame + next text token], a draw of codebook 0, and the
code predictor for the rest. What transformers computes in one ``generate`` call, this computes for many requests at
once, each as far as its text has come: see ``talker_input`` for what is fed, ``talker_prompt`` for the prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from omni_ray.engine.ar_model import PREFILL_CHUNK, CodecLM, FrameStep, Probe
from omni_ray.engine.base import EngineContext
from omni_ray.engine.capture import Captures
from omni_ray.engine.checkpoint_files import load_parts, read_tensor
from omni_ray.engine.fixed_shapes import ELEMENTS, POSITIONS, rounded_up
from omni_ray.engine.prompt_graphs import CHUNK, PromptGraphs
from omni_ray.engine.slot_decoder import RopeRows, SlotDecoder
from omni_ray.engine.types import Request
from omni_ray.errors import ConfigError, InvalidRequestError
from omni_ray.models.qwen3_omni.eager_talker import EagerTalker
from omni_ray.models.qwen3_omni.options import TalkerOptions
from omni_ray.models.qwen3_omni.stage_checkpoint import stage_checkpoint
from omni_ray.models.qwen3_omni.talker_input import TalkerPrompt, TalkerText
from omni_ray.models.qwen3_omni.talker_modules import PREDICTOR_TOP_K, PREDICTOR_TOP_P, talker_module
from omni_ray.models.qwen3_omni.talker_prompt import Markers, media_tensor, probes, talker_ids
from omni_ray.models.qwen3_omni.talker_slots import RowInput, SlotTables

if TYPE_CHECKING:
    from omni_ray.models.qwen3_omni.captured_talker import CapturedTalker

PREFIX: Final = "talker."
TEXT_EMBEDDING: Final = "thinker.model.embed_tokens.weight"

FRAME_RATE: Final = 12.5
"""Frames a second: 1920 samples each at 24 kHz. The checkpoint's config does not say it."""

DEFAULT_SPEAKER: Final = "ethan"
"""Of upstream's ``generate``; a checkpoint without it speaks with its first."""

SUPPRESSED: Final = 1024
"""The vocabulary's last ids are control ids: of them only the stop code may be drawn (hard-coded upstream)."""

PROJECTED_AT_ONCE: Final = 4096


@dataclass(slots=True)
class Speech:
    """One slot: ``length`` of its prompt, rope ``delta``, text ids fed so far, and whether more will come."""

    length: int
    delta: float
    text: list[int] = field(default_factory=list)
    ended: bool = False


class Qwen3OmniTalker(CodecLM):
    """``TalkerPrompt``, then ``TalkerText`` in; frames int64 [codebooks] out.

    Deterministic mode gives every call a fixed shape: decode over all rows, prompts in padded pieces, attention over
    the whole cache, and experts as batched products whose shape does not depend on the routing (transformers'
    ``batched_mm``).
    """

    frame_rate = FRAME_RATE

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.captures = Captures()

    def load(self) -> None:
        """Read ``talker.*`` and the thinker's embedding table, which is projected once and freed.

        Random weights (``load_format: dummy``) never draw the stop code: every answer lasts as long as its limit.

        Raises:
            ConfigError: no model, no audio in this checkpoint, a tensor is missing or unexpected, ``max_model_len``
                exceeds the checkpoint's, or this GPU knows no e4m3 and ``kv_cache_dtype`` asks for it.
        """
        options = self.context.options
        assert isinstance(options, TalkerOptions)
        directory, config = stage_checkpoint(self.context, lambda whole: whole.talker_config.text_config, speaks=True)
        torch.set_num_threads(options.threads)
        self._deterministic = options.deterministic
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cuda":
            if options.kv_cache_dtype == "fp8" and torch.cuda.get_device_capability() < (8, 9):
                raise ConfigError(
                    [f"kv_cache_dtype: fp8 needs compute capability 8.9; {torch.cuda.get_device_name()} lacks it"]
                )
            # This thread's stream: prompts and frames run in the order of their calls.
            torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        random = self.context.load_format == "dummy"
        dtype = self._dtype(options.dtype)
        with self._device:
            upstream = talker_module(config.talker_config, dtype, options.deterministic, random, self._device)
        if random:
            text = config.thinker_config.text_config
            table = torch.randn(text.vocab_size, text.hidden_size, device=self._device) * config.initializer_range
        else:
            load_parts(directory, upstream, PREFIX, self.context.progress)
            table = read_tensor(directory, TEXT_EMBEDDING)
        self._upstream = upstream.eval().requires_grad_(False)
        self._set_up(config, table)
        self._captured = self._capture(options.max_num_seqs) if self._device.type == "cuda" else None
        # float32's experts are computed one by one, which waits for the GPU; deterministic pieces have one shape
        self._prompts = PromptGraphs(self._talker, self.captures) if self.ahead and dtype == torch.bfloat16 else None

    def _dtype(self, option: str) -> torch.dtype:
        """``auto`` is bfloat16 on a GPU; on CPU float32, in which frames equal upstream's."""
        if option == "auto":
            option = "bfloat16" if self._device.type == "cuda" else "float32"
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[option]

    def _set_up(self, config: Any, table: Tensor) -> None:
        options, talker, upstream = self.context.options, config.talker_config, self._upstream
        assert isinstance(options, TalkerOptions)
        # Widths are not ours to choose (a gate is 1 wide), so the rows make up for all of them.
        rows = rounded_up(options.max_num_seqs, ELEMENTS if self._deterministic else 1)
        # One position more than any request needs: rows that are not wanted in a step write there.
        length, fp8 = rounded_up(options.max_model_len + 1, POSITIONS), options.kv_cache_dtype == "fp8"
        self._talker = SlotDecoder(upstream.model, rows, length, fp8=fp8)
        self._codec: nn.Embedding = upstream.model.codec_embedding
        self._markers = Markers.of(config)
        self._speakers: dict[str, int] = {name.lower(): index for name, index in talker.speaker_id.items()}
        self._stop = talker.codec_eos_token_id
        self._text = self._projected(table)
        vocabulary = talker.text_config.vocab_size
        suppressed = torch.arange(vocabulary, device=self._device) >= vocabulary - SUPPRESSED
        suppressed[self._stop] = self.context.load_format == "dummy"  # such a talker would end anywhere: it speaks on
        self._slots: dict[int, Speech] = {}
        self._tables = SlotTables.empty(self._talker.keys, self._talker.values, suppressed, self._text)
        self._eager = EagerTalker(upstream, self._talker, self._tables, self._stop, self._deterministic)

    def _capture(self, rows: int) -> "CapturedTalker":
        """Frames as CUDA graphs; Triton is needed for it, and a GPU."""
        from omni_ray.models.qwen3_omni.captured_talker import CapturedTalker

        return CapturedTalker(
            self._upstream,
            self._tables,
            self._stop,
            PREDICTOR_TOP_K,
            PREDICTOR_TOP_P,
            rows,
            self._deterministic,
            self.captures,
        )

    def _projected(self, table: Tensor) -> Tensor:
        """``text_projection`` of the thinker's whole embedding table: [vocabulary, hidden]."""
        weight = self._upstream.text_projection.linear_fc1.weight
        blocks = [self._upstream.text_projection(block.to(weight)) for block in torch.split(table, PROJECTED_AT_ONCE)]
        return torch.cat(blocks)

    @property
    def speakers(self) -> tuple[str, ...]:
        """Names that ``TalkerPrompt.speaker`` may have, lower case."""
        return tuple(self._speakers)

    def encode(self, prompt: Any) -> RopeRows:
        """See ``SlotModel.encode``.

        Raises:
            InvalidRequestError: the speaker is unknown, or a turn has an unknown role.
            StageFailedError: media rows or grids do not fit the prompt.
        """
        assert isinstance(prompt, TalkerPrompt)
        default = DEFAULT_SPEAKER if DEFAULT_SPEAKER in self._speakers else self.speakers[0]
        name = default if prompt.speaker is None else prompt.speaker.lower()
        if name not in self._speakers:
            known = ", ".join(sorted(self._speakers))
            raise InvalidRequestError(f"unknown voice {prompt.speaker!r}; this model has {known}", "voice")
        ids = talker_ids(prompt, self._speakers[name], self._markers)
        embeds = self._text[torch.tensor(ids.text, device=self._device)]
        if ids.media:
            embeds[list(ids.media)] = self._upstream.hidden_projection(media_tensor(prompt, embeds))
        embeds[-len(ids.codec) :] += self._codec(torch.tensor(ids.codec, device=self._device))
        axes = torch.from_numpy(ids.rope.axes).to(self._device)[:, : len(embeds)]
        return RopeRows(embeds, axes, ids.rope.delta)

    def begin(self, slot: int, prompt: RopeRows) -> int:
        """See ``SlotModel.begin``."""
        self._slots[slot] = Speech(len(prompt), prompt.delta)
        self._tables.said[slot] = False
        self._tables.last[slot] = self._codec.weight[self._markers.codec_bos]
        return 0

    def stop(self) -> None:
        """See ``SlotModel.stop``."""
        self.captures.stop()

    def kv_bytes(self) -> int:
        """See ``SlotModel.kv_bytes``."""
        return self._talker.keys.nbytes + self._talker.values.nbytes

    def release(self, slot: int) -> None:
        """See ``SlotModel.release``; the slot's next request overwrites its KV."""
        self._slots.pop(slot, None)
        if self._prompts is not None:
            self._prompts.drop(slot)

    def sample_as(self, slot: int, request: Request) -> None:
        """See ``CodecLM.sample_as``."""
        if self._captured is not None:
            self._captured.sample_as(slot, request)
        self._eager.sample_as(slot, request)

    def feed(self, slot: int, item: Any) -> int:
        """A unit is a token."""
        assert isinstance(item, TalkerText)
        self._slots[slot].text.extend(item.token_ids)
        return len(item.token_ids)

    def end_feed(self, slot: int) -> None:
        """Next comes ``tts_eos``, once, then ``tts_pad``."""
        self._slots[slot].ended = True

    def probes(self) -> Sequence[Probe]:
        """See ``talker_prompt.probes``."""
        return probes(self._markers, self._talker.length - 20, len(self._text))

    def prefill(self, slot: int, piece: RopeRows, start: int) -> None:
        """See ``CodecLM.prefill``."""
        self._write(slot, piece.embeds, piece.axes, start, fixed=self._deterministic)

    def _write(self, slot: int, embeds: Tensor, axes: Tensor, start: int, *, fixed: bool) -> None:
        if self._prompts is None or not self._prompts.write(slot, embeds, axes, start):
            self._talker.write(slot, embeds, axes, start, fixed=fixed)

    @property
    def prefill_chunk(self) -> int:
        """See ``SlotModel.prefill_chunk``."""
        return PREFILL_CHUNK if self._prompts is None else CHUNK

    @property
    def ahead(self) -> bool:
        """See ``CodecLM.ahead``; fixed shapes are computed one frame at a time."""
        return self._captured is not None and not self._deterministic

    def launch(self, slots: Sequence[int], steps: Sequence[int]) -> Callable[[], FrameStep]:
        """See ``CodecLM.launch``."""
        if self._captured is None:
            return super().launch(slots, steps)
        if self._prompts is not None:
            self._prompts.flush()
        return self._captured.launch(self._inputs(slots, steps))

    def step(self, slots: Sequence[int], steps: Sequence[int]) -> FrameStep:
        """See ``CodecLM.step``: captured frames on a GPU, else ``step_eagerly``."""
        return self.step_eagerly(slots, steps) if self._captured is None else self.launch(slots, steps)()

    def step_eagerly(self, slots: Sequence[int], steps: Sequence[int]) -> FrameStep:
        """The same in plain torch."""
        if self._prompts is not None:
            self._prompts.flush()
        return self._eager.step(self._inputs(slots, steps))

    def _inputs(self, slots: Sequence[int], steps: Sequence[int]) -> list[RowInput]:
        speeches = [self._slots[slot] for slot in slots]
        return [
            (slot, self._text_of(speech, step), step, speech.length + step, speech.length + step + speech.delta)
            for slot, speech, step in zip(slots, speeches, steps, strict=True)
        ]

    def follow(self, slot: int, frames: Tensor, start: int) -> None:
        """See ``CodecLM.follow``: a piece as in ``prefill``, each position the frame before it plus its text token."""
        speech, codes = self._slots[slot], frames.to(self._device)
        sums = self._eager.embedded(codes)
        steps = torch.arange(start, start + len(codes), device=self._device)
        text = self._text[torch.tensor([self._text_of(speech, step) for step in steps.tolist()], device=self._device)]
        embeds = torch.cat((self._tables.last[slot][None], sums[:-1])) + text
        axes = (speech.length + steps + speech.delta).float().expand(3, -1)
        self._write(slot, embeds, axes, speech.length + start, fixed=False)
        self._tables.said[slot, codes[:, 0]] = True
        self._tables.last[slot] = sums[-1]

    def _text_of(self, speech: Speech, step: int) -> int:
        """The text token that a step takes in; the engine makes no step before it is there, or the text is over."""
        if step < len(speech.text):
            return speech.text[step]
        assert speech.ended
        return self._markers.tts_eos if step == len(speech.text) else self._markers.tts_pad
