"""CSM's talker: text in, code frames out, one frame per step and 12.5 of them a second.

A step is the backbone (a Llama) over the frame before, a draw of codebook 0, and the depth decoder for the rest. What
transformers computes in one ``CsmForConditionalGeneration.generate`` call, this computes for many requests at once.
The whole text is in the prompt; nothing is fed.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, CsmForConditionalGeneration

from omni_ray.engine.ar_model import PREFILL_CHUNK, CodecLM, FrameStep, Probe
from omni_ray.engine.checkpoint_files import has_tensor, load_parts
from omni_ray.engine.fixed_shapes import ELEMENTS, POSITIONS, rounded_up
from omni_ray.engine.options import CodecLMOptions
from omni_ray.engine.sampler import CANDIDATES
from omni_ray.engine.slot_decoder import SlotDecoder
from omni_ray.engine.torch_sampler import RowSampling, draw, penalise
from omni_ray.engine.transformers_build import build
from omni_ray.engine.types import Request
from omni_ray.errors import ConfigError
from omni_ray.models.csm.depth_decoder import DepthDecoder
from omni_ray.models.csm.prompt import DEFAULT_SPEAKER, CsmPrompt
from omni_ray.models.csm.stage_checkpoint import CODEC, DECODING, initialise_codebooks, stage_checkpoint
from omni_ray.models.csm.talker_input import PromptRows, TurnIds

BACKBONE_TABLE: Final = "backbone_model.embed_tokens.embed_audio_tokens.weight"


class CsmTalker(CodecLM):
    """``CsmPrompt`` in; frames int64 [codebooks] out.

    All codebooks are drawn by the request's temperature, ``top_k`` and ``top_p``, as in Sesame's generator
    (transformers has a second set of them for the depth decoder); the repetition penalty is codebook 0's. Ids that the
    codec has no vector for are never drawn: upstream draws them and fails when it decodes. The end is a frame of
    ``codebook_eos_token_id`` in all codebooks but the last, as upstream.

    Deterministic mode gives every call a fixed shape: decode over all rows, prompts in padded pieces, attention over
    the whole cache. A recording is encoded alone in any mode.
    """

    encodes_apart = True

    def load(self) -> None:
        """Read the checkpoint without Mimi's decoder.

        Raises:
            ConfigError: no model, a tensor is missing or unexpected, or ``max_model_len`` exceeds the checkpoint's.
        """
        options = self.context.options
        assert isinstance(options, CodecLMOptions)
        directory, config = stage_checkpoint(self.context)
        if options.max_model_len > (longest := config.max_position_embeddings):
            stage, asked = self.context.stage.name, options.max_model_len
            raise ConfigError([f"stage {stage}: max_model_len: {asked} is beyond the checkpoint's {longest}"])
        torch.set_num_threads(options.threads)
        self._deterministic = options.deterministic
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._turn = TurnIds.of(AutoTokenizer.from_pretrained(directory), directory)
        random = self.context.load_format == "dummy"
        upstream: Any = build(CsmForConditionalGeneration, config, self._dtype(options.dtype), initialise=random)
        for part in DECODING:
            delattr(upstream.codec_model, part)
        if random:
            initialise_codebooks(upstream.codec_model)
        else:
            if config.tie_codebooks_embeddings and not has_tensor(directory, BACKBONE_TABLE):
                shared = upstream.depth_decoder.model.embed_tokens.weight
                upstream.backbone_model.embed_tokens.embed_audio_tokens.weight = shared
            skip = tuple(f"{CODEC}{part}." for part in DECODING)
            load_parts(directory, upstream, "", self.context.progress, skip)
        upstream.codec_model.float()  # codes of a recording must not depend on the dtype
        upstream.eval().requires_grad_(False).to(self._device)
        self._upstream, self._config = upstream, config
        self._set_up(options)

    def _dtype(self, option: str) -> torch.dtype:
        """``auto`` is bfloat16 on a GPU; on CPU float32, in which frames equal upstream's."""
        if option == "auto":
            option = "bfloat16" if self._device.type == "cuda" else "float32"
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[option]

    def _set_up(self, options: CodecLMOptions) -> None:
        config, upstream = self._config, self._upstream
        self.frame_rate = float(config.codec_config.frame_rate)
        rows = rounded_up(options.max_num_seqs, ELEMENTS if self._deterministic else 1)
        # One position more than any request needs: rows that are not wanted in a step write there.
        self._backbone = SlotDecoder(upstream.backbone_model, rows, rounded_up(options.max_model_len + 1, POSITIONS))
        self._depth = DepthDecoder(upstream.depth_decoder)
        self._silent = torch.arange(config.vocab_size, device=self._device) >= config.codec_config.codebook_size
        self._lengths: dict[int, int] = {}
        self._sampling = RowSampling.empty(rows, self._device)
        self._said = torch.zeros(rows, config.vocab_size, dtype=torch.bool, device=self._device)
        self._last = torch.zeros(rows, config.hidden_size, device=self._device).to(upstream.lm_head.weight)

    def encode(self, prompt: Any) -> PromptRows:
        """See ``SlotModel.encode``; a recording takes Mimi's encoder some time."""
        assert isinstance(prompt, CsmPrompt)
        parts = []
        if (before := prompt.before) is not None:
            sound = torch.from_numpy(before.samples).to(self._device)[None, None]
            frames = self._upstream.codec_model.encode(sound, return_dict=True).audio_codes[0].T
            end = torch.full_like(frames[:1], self._config.codebook_eos_token_id)
            parts = [self._text(self._turn(prompt.speaker, before.text)), self._frames(torch.cat((frames, end)))]
        parts.append(self._text(self._turn(prompt.speaker, prompt.text)))
        embeds = torch.cat(parts)
        return PromptRows(embeds[:-1], embeds[-1], len(self._turn.plain(prompt.text)))

    def _text(self, ids: Sequence[int]) -> Tensor:
        """Embeddings of text [n, hidden]."""
        embeds: Tensor = self._upstream.embed_text_tokens(torch.tensor(ids, device=self._device))
        return embeds

    def _frames(self, frames: Tensor) -> Tensor:
        """Embeddings of code frames int64 [n, codebooks]: [n, hidden]."""
        embeds: Tensor = self._upstream.backbone_model.embed_tokens(frames[None])[0]
        return embeds

    def units(self, prompt: Any) -> int:
        """See ``CodecLM.units``: a unit is a token of the text to speak."""
        assert isinstance(prompt, PromptRows)
        return prompt.units

    def begin(self, slot: int, prompt: PromptRows) -> int:
        """See ``SlotModel.begin``."""
        self._lengths[slot] = len(prompt)
        self._said[slot] = False
        self._last[slot] = prompt.last
        return 0

    def release(self, slot: int) -> None:
        """See ``SlotModel.release``; the slot's next request overwrites its KV."""
        self._lengths.pop(slot, None)

    def sample_as(self, slot: int, request: Request) -> None:
        """See ``CodecLM.sample_as``."""
        self._sampling.set(slot, request)

    def feed(self, slot: int, item: Any) -> int:
        """Nothing is fed: the prompt holds the whole text."""
        raise TypeError(f"the talker takes nothing behind its prompt, got {type(item).__name__}")

    def end_feed(self, slot: int) -> None:
        """See ``CodecLM.end_feed``."""

    def probes(self) -> Sequence[Probe]:
        """Four prompts of different lengths, one of them longer than a piece."""
        room = max(self._backbone.length - 30, 1)
        sizes = (3, PREFILL_CHUNK + 9, 17, 40)
        return [Probe(CsmPrompt("a" * min(size, room), DEFAULT_SPEAKER)) for size in sizes]

    def prefill(self, slot: int, piece: PromptRows, start: int) -> None:
        """See ``CodecLM.prefill``."""
        self._compute(slot, piece.embeds, start)

    def _compute(self, slot: int, embeds: Tensor, start: int) -> None:
        """Write the KV of positions ``start ..`` of a slot, from their inputs [n, hidden]."""
        length, reach = self._backbone.length, start + len(embeds)
        if self._deterministic:
            # The padding writes beyond these positions, where later ones overwrite it before anyone looks.
            missing = min(rounded_up(len(embeds), PREFILL_CHUNK), length - start) - len(embeds)
            embeds, reach = nn.functional.pad(embeds, (0, 0, 0, missing)), length
        positions = torch.arange(start, start + len(embeds), device=self._device)[None]
        self._backbone.forward(embeds[None], positions, positions, range(slot, slot + 1), reach)

    def follow(self, slot: int, frames: Tensor, start: int) -> None:
        """See ``CodecLM.follow``."""
        codes = frames.to(self._device)
        embeds = torch.cat((self._last[slot][None], self._frames(codes)))
        self._compute(slot, embeds[:-1], self._lengths[slot] + start)
        self._said[slot, codes[:, 0]] = True
        self._last[slot] = embeds[-1]

    def step(self, slots: Sequence[int], steps: Sequence[int]) -> FrameStep:
        """See ``CodecLM.step``.

        Rows between the first and the last slot that are not wanted are computed too and thrown away: gathering KV
        would cost more. They write at the last position, which is nobody's.
        """
        length = self._backbone.length
        rows = range(self._backbone.slots) if self._deterministic else range(slots[0], slots[-1] + 1)
        mine = slice(rows.start, rows.stop)
        where, frame = [length - 1] * len(rows), [0] * len(rows)
        for slot, step in zip(slots, steps, strict=True):
            where[slot - rows.start], frame[slot - rows.start] = self._lengths[slot] + step, step
        positions = torch.tensor(where, device=self._device)[:, None]
        reach = length if self._deterministic else max(w for w in where if w < length - 1) + 1
        hidden = self._backbone.forward(self._last[mine, None], positions, positions, rows, reach)[:, 0]

        how, numbers = self._sampling.take(mine), torch.tensor(frame, device=self._device)
        candidates = CANDIDATES if self._deterministic else int(how.top_k.max())
        raw = self._upstream.lm_head(hidden).float()

        def choose(codebook: int, logits: Tensor) -> Tensor:
            return draw(logits.masked_fill(self._silent, -torch.inf), how, numbers, codebook, candidates)

        first = choose(0, penalise(raw, self._said[mine], how.penalty))
        frames, tail = self._depth.complete(hidden, first, choose)
        last = self._frames(frames)
        taken = torch.tensor([slot - rows.start for slot in slots], device=self._device)
        frames, evidence = frames[taken], torch.cat((raw, tail.float()), -1)[taken]
        # Only now, when nothing can fail any more.
        self._said[taken + rows.start, frames[:, 0]] = True
        self._last[taken + rows.start] = last[taken]
        ended = (frames[:, :-1] == self._config.codebook_eos_token_id).all(-1).tolist()
        return FrameStep(frames.cpu(), ended, torch.isfinite(evidence.sum(-1)).tolist(), evidence)
