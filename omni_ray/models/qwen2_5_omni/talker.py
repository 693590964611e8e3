"""The talker of Qwen2.5-Omni: the thinker's rows in, one code per step and 50 of them a second.

A step is transformers' talker (its modules, over ``SlotDecoder``'s slots) over the embedding of the last code plus the
row of the next text token, both as wide as the thinker, brought to the talker's width by one projection. All as
upstream's ``generate`` has it, with the prompt's turns all kept:

    text    the prompt's rows   bos   row 1   row 2   ...   row n   eos      pad  pad ...
    codec   -                   pad   bos     code 1  ...   code n  code n+1 ...

The column of row 1 needs a generated token, so it is the first step and no part of the prompt.

transformers 5.19 and 5.24 compute so only for chats that are padded: ``generate`` drops a mask that hides nothing, and
without one their talker leaves out the codec's pad and bos, and where images are. 5.17 computes so for all, as we do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2_5OmniTalkerForConditionalGeneration

from omni_ray.engine.ar_model import PREFILL_CHUNK, CodecLM, FrameStep, Probe
from omni_ray.engine.checkpoint_files import load_parts, read_tensor
from omni_ray.engine.fixed_shapes import ELEMENTS, POSITIONS, rounded_up
from omni_ray.engine.precision import compute_dtype
from omni_ray.engine.sampler import CANDIDATES
from omni_ray.engine.slot_decoder import RopeRows, SlotDecoder
from omni_ray.engine.torch_sampler import RowSampling, draw, penalise
from omni_ray.engine.transformers_build import build
from omni_ray.engine.types import Request
from omni_ray.errors import StageFailedError
from omni_ray.models.qwen2_5_omni.options import TalkerOptions
from omni_ray.models.qwen2_5_omni.positions import rope_positions
from omni_ray.models.qwen2_5_omni.speakers import load_speakers, random_speakers
from omni_ray.models.qwen2_5_omni.stage_checkpoint import stage_checkpoint
from omni_ray.models.qwen2_5_omni.talker_input import TalkerPrompt, TalkerRows

PREFIX: Final = "talker."
TEXT_EMBEDDING: Final = "thinker.model.embed_tokens.weight"
FRAME_RATE: Final = 50.0
"""Codes a second: 480 samples each at 24 kHz."""


@dataclass(slots=True)
class Speech:
    """One slot: ``length`` of its prompt, rope ``delta``, rows [thinker hidden] fed so far, and whether more come."""

    length: int
    delta: float
    rows: list[Tensor] = field(default_factory=list)
    ended: bool = False


class Qwen2_5OmniTalker(CodecLM):
    """``TalkerPrompt``, then ``TalkerRows`` in; frames int64 [1] out.

    Draws as upstream: the penalty sees the prompt's codec ids too, the start code is never drawn, and both the end and
    the padding code end the speech. Ids that token2wav has no code for are not drawn either: upstream fails on them.

    Deterministic mode gives every call a fixed shape.
    """

    frame_rate = FRAME_RATE

    def load(self) -> None:
        """Read ``talker.*``, the speakers, and the thinker's embeddings of three marks and each speaker's.

        Raises:
            ConfigError: no model, no audio in this checkpoint, a tensor is missing or unexpected, or ``max_model_len``
                exceeds the checkpoint's.
        """
        options = self.context.options
        assert isinstance(options, TalkerOptions)
        model, directory, config = stage_checkpoint(self.context, lambda whole: whole.talker_config, speaks=True)
        torch.set_num_threads(options.threads)
        self._deterministic = options.deterministic
        random = self.context.load_format == "dummy"
        talker, dtype = config.talker_config, compute_dtype(options.dtype)
        upstream: Any = build(Qwen2_5OmniTalkerForConditionalGeneration, talker, dtype, initialise=random)
        if not random:
            load_parts(directory, upstream, PREFIX, self.context.progress)
        self._upstream = upstream.requires_grad_(False)
        self._speakers = random_speakers(config) if random else load_speakers(model, directory, config)
        self._marks(directory, config, dtype, random)
        fixed = self._deterministic
        rows = rounded_up(options.max_num_seqs, ELEMENTS if fixed else 1)
        # One position more than any request needs: rows that are not wanted in a step write there.
        length = rounded_up(options.max_model_len + 1, POSITIONS if fixed else 1)
        self._decoder = SlotDecoder(upstream.model, rows, length)
        self._codec = upstream.model.embed_tokens
        self._image = talker.image_token_index
        self._pad, self._bos = talker.tts_codec_pad_token_id, talker.tts_codec_start_token_id
        self._stops = torch.tensor([talker.tts_codec_end_token_id, self._pad])
        self._in_prompt = [talker.tts_codec_mask_token_id, self._pad, self._bos]
        decodable = config.token2wav_config.dit_config.num_embeds + 1
        self._suppressed = torch.arange(talker.vocab_size) >= decodable
        self._suppressed[self._stops] = False
        self._suppressed[self._bos] = True
        self._slots: dict[int, Speech] = {}
        self._sampling = RowSampling.empty(rows, torch.device("cpu"))
        self._said = torch.zeros(rows, talker.vocab_size, dtype=torch.bool)
        self._last = torch.zeros(rows, talker.embedding_size, dtype=dtype)

    def _marks(self, directory: Path, config: Any, dtype: torch.dtype, random: bool) -> None:
        """Embeddings of the text's beginning by speaker, of its end, and of what stands behind it."""
        text, talker = config.thinker_config.text_config, config.talker_config
        if random:
            table = torch.randn(text.vocab_size, text.hidden_size) * text.initializer_range
        else:
            table = read_tensor(directory, TEXT_EMBEDDING)
        self._text_bos = {s: table[self._speakers.of(s).bos_token].to(dtype) for s in self._speakers.names}
        self._text_eos = table[talker.tts_text_end_token_id].to(dtype)
        self._text_pad = table[talker.tts_text_pad_token_id].to(dtype)

    def encode(self, prompt: Any) -> RopeRows:
        """See ``SlotModel.encode``.

        Raises:
            InvalidRequestError: the speaker is unknown.
            StageFailedError: rows or images do not fit the prompt.
        """
        assert isinstance(prompt, TalkerPrompt)
        bos = self._text_bos[self._speakers.named(prompt.speaker)]
        if prompt.rows.shape != (len(prompt.prompt_ids), len(bos)):
            shape = prompt.rows.shape
            raise StageFailedError(
                f"rows of shape {shape} arrived for {len(prompt.prompt_ids)} positions of {len(bos)}"
            )
        # The two ids stand for the speaker's mark and the first token, whatever they are.
        ids = (*prompt.prompt_ids, -1, -1)
        try:
            rope = rope_positions(ids, self._image, prompt.grids)
        except ValueError as error:
            raise StageFailedError(f"images do not fit the prompt: {error}") from error
        rows = torch.cat((torch.tensor(prompt.rows).to(bos), (bos + self._codec.weight[self._pad])[None]))
        axes = torch.from_numpy(rope.axes)[:, : len(rows)]
        return RopeRows(self._upstream.thinker_to_talker_proj(rows), axes, rope.delta)

    def begin(self, slot: int, prompt: RopeRows) -> int:
        """See ``SlotModel.begin``."""
        self._slots[slot] = Speech(len(prompt), prompt.delta)
        self._said[slot] = False
        self._said[slot, self._in_prompt] = True
        self._last[slot] = self._codec.weight[self._bos]
        return 0

    def kv_bytes(self) -> int:
        """See ``SlotModel.kv_bytes``."""
        return self._decoder.keys.nbytes + self._decoder.values.nbytes

    def release(self, slot: int) -> None:
        """See ``SlotModel.release``; the slot's next request overwrites its KV."""
        self._slots.pop(slot, None)

    def sample_as(self, slot: int, request: Request) -> None:
        """See ``CodecLM.sample_as``."""
        self._sampling.set(slot, request)

    def feed(self, slot: int, item: Any) -> int:
        """A unit is a token's row."""
        assert isinstance(item, TalkerRows)
        if item.rows.shape[1:] != self._text_eos.shape:
            raise StageFailedError(f"rows of width {item.rows.shape[1:]} arrived, not {len(self._text_eos)}")
        self._slots[slot].rows.extend(torch.tensor(item.rows).to(self._text_eos))
        return len(item.rows)

    def end_feed(self, slot: int) -> None:
        """Next comes the text's end, once, then its padding."""
        self._slots[slot].ended = True

    def probes(self) -> Sequence[Probe]:
        """Four prompts of different lengths, one of them longer than a piece."""
        noise = np.random.default_rng(0)
        width, room = len(self._text_eos), self._decoder.length - 20
        sizes = [min(size, max(room, 1)) for size in (3, PREFILL_CHUNK + 9, 17, 40)]

        def rows(count: int) -> Any:
            return noise.standard_normal((count, width)).astype(np.float32)

        return [Probe(TalkerPrompt((0,) * size, rows(size)), (TalkerRows(rows(8)),)) for size in sizes]

    def prefill(self, slot: int, piece: RopeRows, start: int) -> None:
        """See ``CodecLM.prefill``."""
        self._decoder.write(slot, piece.embeds, piece.axes, start, fixed=self._deterministic)

    def step(self, slots: Sequence[int], steps: Sequence[int]) -> FrameStep:
        """See ``CodecLM.step``.

        Rows between the first and the last slot that are not wanted are computed too and thrown away: gathering KV
        would cost more. They write at the last position, which is nobody's.
        """
        length = self._decoder.length
        rows = range(self._decoder.slots) if self._deterministic else range(slots[0], slots[-1] + 1)
        mine = slice(rows.start, rows.stop)
        text, where = [self._text_pad] * len(rows), [length - 1] * len(rows)
        frame, angles = [0] * len(rows), [0.0] * len(rows)
        for slot, step in zip(slots, steps, strict=True):
            row, speech = slot - rows.start, self._slots[slot]
            text[row], frame[row] = self._text_of(speech, step), step
            where[row], angles[row] = speech.length + step, speech.length + step + speech.delta
        embeds = self._upstream.thinker_to_talker_proj(self._last[mine] + torch.stack(text))
        rope = torch.tensor(angles).expand(3, -1)[..., None]
        reach = length if self._deterministic else max(w for w in where if w < length - 1) + 1
        hidden = self._decoder.forward(embeds[:, None], rope, torch.tensor(where)[:, None], rows, reach)[:, 0]

        how = self._sampling.take(mine)
        raw = self._upstream.codec_head(hidden).float()
        logits = penalise(raw, self._said[mine], how.penalty).masked_fill(self._suppressed, -torch.inf)
        candidates = CANDIDATES if self._deterministic else int(how.top_k.max())
        codes = draw(logits, how, torch.tensor(frame), 0, candidates)
        taken = torch.tensor([slot - rows.start for slot in slots])
        codes, evidence, places = codes[taken], raw[taken], taken + rows.start
        # Only now, when nothing can fail any more.
        self._said[places, codes] = True
        self._last[places] = self._codec(codes)
        ended = torch.isin(codes, self._stops).tolist()
        return FrameStep(codes[:, None], ended, torch.isfinite(evidence.sum(-1)).tolist(), evidence)

    def follow(self, slot: int, frames: Tensor, start: int) -> None:
        """See ``CodecLM.follow``: a piece as in ``prefill``, each position the code before it plus its text's row."""
        speech, codes = self._slots[slot], frames[:, 0]
        said, steps = self._codec(codes), range(start, start + len(codes))
        text = torch.stack([self._text_of(speech, step) for step in steps])
        embeds = self._upstream.thinker_to_talker_proj(torch.cat((self._last[slot][None], said[:-1])) + text)
        first = speech.length + start
        axes = (torch.arange(first, first + len(codes)) + speech.delta).float().expand(3, -1)
        self._decoder.write(slot, embeds, axes, first, fixed=False)
        self._said[slot, codes] = True
        self._last[slot] = said[-1]

    def _text_of(self, speech: Speech, step: int) -> Tensor:
        """The text side of a step; the engine makes no step before its row is there, or the text is over."""
        if step < len(speech.rows):
            return speech.rows[step]
        assert speech.ended
        mark: Tensor = self._text_eos if step == len(speech.rows) else self._text_pad
        return mark
