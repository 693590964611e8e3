"""CSM's talker: text in, code frames out, one frame per step and 12.5 of them a second.

A step is the backbone (a Llama) over the frame before, a draw of codebook 0, and the depth decoder for the rest. What
transformers computes in one ``CsmForConditionalGeneration.generate`` call, this computes for many requests at once.
The whole text is in the prompt; nothing is fed.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoTokenizer, CsmForConditionalGeneration

from omni_ray.engine.ar_model import PREFILL_CHUNK, FrameStep, Probe
from omni_ray.engine.checkpoint_files import check_positions, has_tensor, load_parts
from omni_ray.engine.options import CodecLMOptions
from omni_ray.engine.prompted_talker import PromptedTalker
from omni_ray.engine.sampler import CANDIDATES
from omni_ray.engine.torch_sampler import RowSampling, draw, penalise
from omni_ray.engine.transformers_build import build
from omni_ray.engine.types import Request
from omni_ray.models.csm.depth_decoder import DepthDecoder
from omni_ray.models.csm.prompt import DEFAULT_SPEAKER, CsmPrompt
from omni_ray.models.csm.stage_checkpoint import CODEC, DECODING, initialise_codebooks, stage_checkpoint
from omni_ray.models.csm.talker_input import PromptRows, TurnIds

BACKBONE_TABLE: Final = "backbone_model.embed_tokens.embed_audio_tokens.weight"


class CsmTalker(PromptedTalker):
    """``CsmPrompt`` in; frames int64 [codebooks] out.

    All codebooks are drawn by the request's temperature, ``top_k`` and ``top_p``, as in Sesame's generator
    (transformers has a second set of them for the depth decoder); the repetition penalty is codebook 0's. Ids that the
    codec has no vector for are never drawn: upstream draws them and fails when it decodes. The end is a frame of
    ``codebook_eos_token_id`` in all codebooks but the last, as upstream.

    A recording is encoded alone in any mode.
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
        check_positions(self.context.stage.name, options.max_model_len, config.max_position_embeddings)
        torch.set_num_threads(options.threads)
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
        rows = self.hold(upstream.backbone_model, options, upstream.lm_head.weight)
        self._depth = DepthDecoder(upstream.depth_decoder)
        self._silent = torch.arange(config.vocab_size, device=self._device) >= config.codec_config.codebook_size
        self._sampling = RowSampling.empty(rows, self._device)
        self._said = torch.zeros(rows, config.vocab_size, dtype=torch.bool, device=self._device)

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

    def clear(self, slot: int) -> None:
        """See ``PromptedTalker.clear``."""
        self._said[slot] = False

    def sample_as(self, slot: int, request: Request) -> None:
        """See ``CodecLM.sample_as``."""
        self._sampling.set(slot, request)

    def probes(self) -> Sequence[Probe]:
        """Four prompts of different lengths, one of them longer than a piece."""
        room = max(self._backbone.length - 30, 1)
        sizes = (3, PREFILL_CHUNK + 9, 17, 40)
        return [Probe(CsmPrompt("a" * min(size, room), DEFAULT_SPEAKER)) for size in sizes]

    def prefill(self, slot: int, piece: PromptRows, start: int) -> None:
        """See ``CodecLM.prefill``."""
        self.compute(slot, piece.embeds, start)

    def follow(self, slot: int, frames: Tensor, start: int) -> None:
        """See ``CodecLM.follow``."""
        codes = frames.to(self._device)
        self.follow_rows(slot, self._frames(codes), start)
        self._said[slot, codes[:, 0]] = True

    def step(self, slots: Sequence[int], steps: Sequence[int]) -> FrameStep:
        """See ``CodecLM.step``."""
        rows = self.step_rows(slots, steps)
        how = self._sampling.take(rows.mine)
        candidates = CANDIDATES if self._deterministic else int(how.top_k.max())
        raw = self._upstream.lm_head(rows.hidden).float()

        def choose(codebook: int, logits: Tensor) -> Tensor:
            return draw(logits.masked_fill(self._silent, -torch.inf), how, rows.numbers, codebook, candidates)

        first = choose(0, penalise(raw, self._said[rows.mine], how.penalty))
        frames, tail = self._depth.complete(rows.hidden, first, choose)
        last = self._frames(frames)
        frames, evidence = frames[rows.taken], torch.cat((raw, tail.float()), -1)[rows.taken]
        # Only now, when nothing can fail any more.
        self._said[rows.slots, frames[:, 0]] = True
        self._last[rows.slots] = last[rows.taken]
        ended = (frames[:, :-1] == self._config.codebook_eos_token_id).all(-1).tolist()
        return FrameStep(frames.cpu(), ended, torch.isfinite(evidence.sum(-1)).tolist(), evidence)
