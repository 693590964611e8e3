"""Higgs Audio v2's talker: text in, rows of eight codes out, one row per step and 25 of them a second.

What transformers computes in one ``HiggsAudioV2ForConditionalGeneration.generate`` call, this computes for many
requests at once. The whole text is in the prompt; nothing is fed. Rows stand in the delay pattern (``delay``);
upstream's first one, all begin codes, is the end of our prompt.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoTokenizer, HiggsAudioV2ForConditionalGeneration

from omni_ray.engine.ar_model import PREFILL_CHUNK, FrameStep, Probe
from omni_ray.engine.checkpoint_files import check_positions, load_parts
from omni_ray.engine.prompted_talker import PromptedTalker
from omni_ray.engine.sampler import CANDIDATES
from omni_ray.engine.transformers_build import build
from omni_ray.engine.types import Request
from omni_ray.errors import ConfigError, InvalidRequestError
from omni_ray.models.higgs_audio_v2.codec_modules import CodecEncoder
from omni_ray.models.higgs_audio_v2.codec_weights import load_half
from omni_ray.models.higgs_audio_v2.delay import delayed
from omni_ray.models.higgs_audio_v2.dual_ffn import DualFFN
from omni_ray.models.higgs_audio_v2.options import HiggsTalkerOptions
from omni_ray.models.higgs_audio_v2.prompt import HiggsPrompt
from omni_ray.models.higgs_audio_v2.rows import CodeRows, RepetitionAware
from omni_ray.models.higgs_audio_v2.stage_checkpoint import codec_checkpoint, talker_checkpoint
from omni_ray.models.higgs_audio_v2.talker_input import ChatIds, PromptRows, joined


class HiggsTalker(PromptedTalker):
    """``HiggsPrompt`` in; rows int64 [codebooks] out, begin and end codes in them.

    All codebooks are drawn by the request's temperature, ``top_k``, ``top_p`` and repetition penalty (upstream knows no
    penalty), and anew where they repeat, as the checkpoint's ``generation_config.json`` says; a greedy request draws
    nothing anew, where upstream does. An answer is over at a row of end codes, as upstream.

    A recording is encoded alone in any mode.
    """

    encodes_apart = True

    def load(self) -> None:
        """Read the talker's checkpoint, and the encoding half of the codec's.

        Raises:
            ConfigError: no model, no codec or another one, a tensor is missing or unexpected, or ``max_model_len``
                exceeds the checkpoint's.
        """
        options = self.context.options
        assert isinstance(options, HiggsTalkerOptions)
        directory, config = talker_checkpoint(self.context)
        check_positions(self.context.stage.name, options.max_model_len, config.max_position_embeddings)
        torch.set_num_threads(options.threads)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._chat = ChatIds.of(AutoTokenizer.from_pretrained(directory), directory)
        random = self.context.load_format == "dummy"
        dtype = self._dtype(options.dtype)
        upstream: Any = build(HiggsAudioV2ForConditionalGeneration, config, dtype, initialise=random)
        if not random:
            load_parts(directory, upstream, "", self.context.progress, ("text_lm_head.", "audio_decoder_proj."))
        upstream.requires_grad_(False).to(self._device)
        self._upstream, self._config = upstream, config
        self._load_encoder(options)
        self._set_up(options, RepetitionAware.of(directory))

    def _load_encoder(self, options: HiggsTalkerOptions) -> None:
        """Codes of a recording must not depend on the dtype: it stays float32."""
        directory, codec = codec_checkpoint(self.context, options.codec)
        wanted, known = self._config.num_codebooks, codec.num_quantizers
        if wanted != known or codec.codebook_size > self._config.codebook_size:
            raise ConfigError(
                [f"{directory}: {known} codebooks of {codec.codebook_size} do not fit the talker's {wanted}"]
            )
        self.frame_rate = codec.sample_rate / codec.hop_length
        self._shortest = codec.hop_length
        self._encoder = load_half(CodecEncoder, directory, codec, self.context)

    def _dtype(self, option: str) -> torch.dtype:
        """``auto`` is bfloat16 on a GPU; on CPU float32, in which rows equal upstream's."""
        if option == "auto":
            option = "bfloat16" if self._device.type == "cuda" else "float32"
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[option]

    def _set_up(self, options: HiggsTalkerOptions, again: RepetitionAware) -> None:
        config, upstream = self._config, self._upstream
        self._layers = DualFFN(upstream.model)
        rows = self.hold(self._layers, options, upstream.audio_lm_head.weight)
        self._codes = CodeRows(rows, config, again, self._device)

    def encode(self, prompt: Any) -> PromptRows:
        """See ``SlotModel.encode``; a recording takes the codec's encoder some time.

        Raises:
            InvalidRequestError: the recording is shorter than a frame.
        """
        assert isinstance(prompt, HiggsPrompt)
        if (before := prompt.before) is None:
            return self._prompt_rows(prompt.text)
        if len(before.samples) < self._shortest:
            raise InvalidRequestError(f"ref_audio: {len(before.samples)} samples are less than one frame", "ref_audio")
        return self._prompt_rows(prompt.text, before.text, self.hear(before.samples))

    @torch.inference_mode()
    def hear(self, samples: NDArray[np.float32]) -> Tensor:
        """Code frames int64 [n, codebooks] of a recording [T] at the codec's rate."""
        frames: Tensor = self._encoder(torch.from_numpy(samples).to(self._device))
        return frames

    def _prompt_rows(self, text: str, before: str | None = None, frames: Tensor | None = None) -> PromptRows:
        """The prompt for a text, after the words ``before`` with their code frames int64 [n, codebooks]."""
        config, parts = self._config, []
        begin, end = config.audio_stream_bos_id, config.audio_stream_eos_id
        if before is not None and frames is not None:
            rows = delayed(frames.cpu().numpy(), begin, end)
            parts = [(self._text(self._chat.before_sound(before, first=True)), False)]
            parts.append((self._sound(torch.from_numpy(rows).to(self._device)), True))
        parts.append((self._text(self._chat.before_sound(text, first=not parts)), False))
        last = self._sound(torch.full((1, config.num_codebooks), begin, device=self._device))[0]
        return joined(parts, last, len(self._chat.plain(text.strip())))

    def _text(self, ids: Sequence[int]) -> Tensor:
        """Embeddings of text [n, hidden]."""
        embeds: Tensor = self._upstream.model.embed_tokens(torch.tensor(ids, device=self._device))
        return embeds

    def _sound(self, rows: Tensor) -> Tensor:
        """Embeddings of rows int64 [n, codebooks]: [n, hidden]."""
        embeds: Tensor = self._upstream.model.embed_audio_tokens(rows)
        return embeds

    def clear(self, slot: int) -> None:
        """See ``PromptedTalker.clear``."""
        self._codes.clear(slot)

    def sample_as(self, slot: int, request: Request) -> None:
        """See ``CodecLM.sample_as``."""
        self._codes.sample_as(slot, request)

    def probes(self) -> Sequence[Probe]:
        """Four prompts of different lengths, one of them longer than a piece."""
        room = max(self._backbone.length - 200, 1)
        return [Probe(HiggsPrompt("a" * min(size, room))) for size in (3, PREFILL_CHUNK + 9, 17, 40)]

    def prefill(self, slot: int, piece: PromptRows, start: int) -> None:
        """See ``CodecLM.prefill``."""
        kinds = piece.sound
        if self._deterministic:
            self._layers.sound = nn.functional.pad(kinds, (0, self.padding(len(kinds), start)))[None]
        else:
            alike = bool(kinds.all()) or not bool(kinds.any())
            self._layers.sound = bool(kinds[0]) if alike else kinds[None]
        self.compute(slot, piece.embeds, start)

    def follow(self, slot: int, frames: Tensor, start: int) -> None:
        """See ``CodecLM.follow``."""
        codes, row = frames.to(self._device), torch.tensor([slot], device=self._device)
        self._layers.sound = True
        self.follow_rows(slot, self._sound(codes), start)
        for number, of_step in enumerate(codes, start=start):
            self._codes.take(row, of_step[None], torch.tensor([number], device=self._device))

    def step(self, slots: Sequence[int], steps: Sequence[int]) -> FrameStep:
        """See ``CodecLM.step``."""
        self._layers.sound, config = True, self._config
        rows = self.step_rows(slots, steps)
        raw = self._upstream.audio_lm_head(rows.hidden).float()
        logits = raw.view(len(raw), config.num_codebooks, config.codebook_size)
        codes = self._codes.draw(logits, rows.mine, rows.numbers, CANDIDATES if self._deterministic else None)
        last = self._sound(codes)
        frames, evidence = codes[rows.taken], raw[rows.taken]
        finite = torch.isfinite(evidence.sum(-1)).tolist()
        # Only now, when nothing can fail any more.
        self._codes.take(rows.slots, frames, rows.numbers[rows.taken])
        self._last[rows.slots] = last[rows.taken]
        return FrameStep(frames.cpu(), self._codes.over(frames).tolist(), finite, evidence)
