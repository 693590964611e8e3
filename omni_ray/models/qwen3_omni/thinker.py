"""The thinker: Qwen3-Omni's text model with ears and eyes, over static KV slots.

Towers, norms, experts and rotary tables are transformers'; the decoder's pass (``thinker_decoder``), rope positions and
the expansion of placeholders are ours, and equal upstream's ``generate`` token for token.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoder,
    Qwen3OmniMoeThinkerTextModel,
    Qwen3OmniMoeVisionEncoder,
)

from omni_ray.engine.ar_model import PREFILL_CHUNK, ARModel, Probe
from omni_ray.engine.checkpoint_files import load_parts
from omni_ray.engine.options import AROptions
from omni_ray.engine.precision import compute_dtype
from omni_ray.engine.transformers_build import build
from omni_ray.engine.types import Chunk, LatentChunk, Message, TextPart
from omni_ray.models.qwen3_omni.media import Towers
from omni_ray.models.qwen3_omni.prompt import ChatPrompt
from omni_ray.models.qwen3_omni.stage_checkpoint import stage_checkpoint
from omni_ray.models.qwen3_omni.thinker_decoder import Deepstack, ThinkerDecoder
from omni_ray.models.qwen3_omni.thinker_prompt import Piece, ThinkerPrompt
from omni_ray.models.qwen3_omni.thinker_text import ThinkerText
from omni_ray.models.qwen3_omni.weights import initialise_experts

PREFIX: Final = "thinker."


class ThinkerParts(nn.Module):
    """The thinker's modules under the names that checkpoints give them."""

    def __init__(self, config: Any, dtype: torch.dtype, *, initialise: bool) -> None:
        super().__init__()
        text = config.text_config
        self.audio_tower = build(Qwen3OmniMoeAudioEncoder, config.audio_config, dtype, initialise=initialise)
        self.visual = build(Qwen3OmniMoeVisionEncoder, config.vision_config, dtype, initialise=initialise)
        self.model = build(Qwen3OmniMoeThinkerTextModel, text, dtype, initialise=initialise)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False, dtype=dtype)
        if initialise:
            nn.init.normal_(self.lm_head.weight, std=text.initializer_range)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight


class Qwen3OmniThinker(ARModel):
    """``ChatPrompt`` in, text out; and once per answer what is needed to speak it.

    Before the first token come a ``PromptChunk`` and, if user turns hold media, a ``LatentChunk`` with one row for each
    of their placeholders: hidden states behind the first ``accept_hidden_layer`` layers, before any norm (upstream's
    ``hidden_states[accept_hidden_layer]``). A checkpoint without audio output gives the ``PromptChunk`` only.

    Deterministic mode gives every call a fixed shape: decode over all slots, prompts in padded pieces, attention over
    the whole cache length, every expert for every token. Towers always compute one request at a time.
    """

    def load(self) -> None:
        """Load the checkpoint's ``thinker.`` tensors, or draw random ones (``load_format: dummy``), and warm up.

        Raises:
            ConfigError: no model, a tensor is missing or unexpected, or ``max_model_len`` exceeds the checkpoint's.
        """
        options = self.context.options
        assert isinstance(options, AROptions)
        directory, config = stage_checkpoint(self.context, lambda whole: whole.thinker_config.text_config, speaks=False)
        torch.set_num_threads(options.threads)
        self._deterministic = options.deterministic
        self._text = ThinkerText(directory, config, options.max_model_len)
        self.stop_ids = self._text.stop_ids
        parts = self._parts(directory, config.thinker_config, compute_dtype(options.dtype))
        self._towers = Towers(parts.audio_tower, parts.visual)
        self._decoder = ThinkerDecoder(
            parts.model, parts.lm_head.weight, options.max_num_seqs, options.max_model_len, self._deterministic
        )
        slots = options.max_num_seqs
        self._prompts: list[ThinkerPrompt | None] = [None] * slots
        self._deltas = [0.0] * slots
        self._rows: list[list[Tensor]] = [[] for _ in range(slots)]
        for count in range(1, slots + 1):
            self.step(range(count), [0] * count, [0] * count)

    def encode(self, prompt: Any) -> ThinkerPrompt:
        """Tokens and positions of a ``ChatPrompt``, and its media heard and seen."""
        prepared = self._text.encode(prompt)
        if prepared.sound is not None:
            prepared.heard = self._towers.hear(prepared.sound)
        if prepared.pictures is not None:
            prepared.seen = self._towers.see(prepared.pictures)
        return prepared

    def penalised(self, prompt: ThinkerPrompt) -> Sequence[int]:
        """See ``ARModel.penalised``."""
        return prompt.ids

    def detokenize(self, token_id: int) -> bytes:
        """See ``ARModel.detokenize``."""
        return self._text.detokenize(token_id)

    def begin(self, slot: int, prompt: ThinkerPrompt) -> int:
        """Remember the prompt; nothing of it is in the slot."""
        self._prompts[slot], self._deltas[slot], self._rows[slot] = prompt, prompt.delta, []
        return 0

    def prefill(self, slot: int, ids: Piece, start: int) -> Tensor:
        """See ``ARModel.prefill``."""
        piece, last = ids, len(ids.ids) - 1
        reach, axes, tokens = start + len(piece.ids), torch.from_numpy(piece.axes), list(piece.ids)
        if self._deterministic:
            # The padding writes beyond the prompt, where the answer will overwrite it before anyone looks.
            padding = min(PREFILL_CHUNK, self._decoder.length - start) - len(tokens)
            tokens, axes, reach = [*tokens, *[0] * padding], F.pad(axes, (0, padding)), self._decoder.length
        x = F.embedding(torch.tensor(tokens), self._decoder.embedding)
        deepstack = None
        if piece.heard is not None:
            x[piece.heard_at] = piece.heard.to(x.dtype)
        if piece.seen is not None:
            x[piece.seen_at] = piece.seen.rows.to(x.dtype)
            deepstack = Deepstack(piece.seen_at, [features.to(x.dtype) for features in piece.seen.deepstack])
        hidden, captured = self._decoder.forward(
            x[None],
            torch.arange(start, start + len(tokens))[None],
            axes[:, None],
            range(slot, slot + 1),
            reach,
            deepstack,
            self._text.capture if len(piece.wanted) else None,
        )
        if captured is not None:
            self._rows[slot].append(captured[0, piece.wanted].float())
        return self._decoder.logits(hidden[0, last])

    def follow(self, slot: int, ids: Sequence[int], start: int) -> None:
        """See ``ARModel.follow``."""
        nowhere = torch.zeros(0, dtype=torch.int64)
        axes = np.arange(start, start + len(ids), dtype=np.float32)[None].repeat(3, 0) + np.float32(self._deltas[slot])
        self.prefill(slot, Piece(ids, axes, None, nowhere, None, nowhere, nowhere), start)

    def prompt_outputs(self, slot: int) -> Sequence[Chunk]:
        """What was asked, and the rows of its media in user turns."""
        prompt = self._prompts[slot]
        assert prompt is not None
        rows = torch.cat(self._rows[slot]).numpy() if self._rows[slot] else np.zeros((0, 0), np.float32)
        self._rows[slot] = []
        asked = self._text.asked(prompt, len(rows))
        return [asked, LatentChunk(0, rows, ends_segment=True)] if len(rows) else [asked]

    def step(self, slots: Sequence[int], last_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """See ``ARModel.step``.

        Free slots and slots with an unfinished prompt between the first and the last one are computed too and thrown
        away, which is cheaper than gathering KV. They write at a slot's last place: no request gets that far, because
        its last token is never computed.
        """
        length = self._decoder.length
        rows = range(self._decoder.slots) if self._deterministic else range(slots[0], slots[-1] + 1)
        ids, where, at = [0] * len(rows), [length - 1] * len(rows), [0.0] * len(rows)
        taken = [slot - rows.start for slot in slots]
        for row, slot, token, position in zip(taken, slots, last_ids, positions, strict=True):
            ids[row], where[row], at[row] = token, position, position + self._deltas[slot]
        x = F.embedding(torch.tensor(ids)[:, None], self._decoder.embedding)
        axes = torch.tensor(at, dtype=torch.float32)[None, :, None].repeat(3, 1, 1)
        reach = length if self._deterministic else max(positions) + 1
        hidden, _ = self._decoder.forward(x, torch.tensor(where)[:, None], axes, rows, reach)
        logits = self._decoder.logits(hidden[:, 0])
        return logits if len(taken) == len(rows) else logits[taken]

    def kv_bytes(self) -> int:
        """See ``SlotModel.kv_bytes``."""
        return int(self._decoder.kv.nbytes)

    def encoder_bytes(self) -> int:
        """See ``SlotModel.encoder_bytes``."""
        return sum(prompt.feature_bytes() for prompt in list(self._prompts) if prompt is not None)

    def release(self, slot: int) -> None:
        """Drop the prompt's features and rows; the KV is overwritten by the slot's next request."""
        self._prompts[slot], self._rows[slot] = None, []

    def probes(self) -> Sequence[Probe]:
        """Texts of different lengths, one of them longer than a prefill piece, as far as they fit."""
        options = self.context.options
        assert isinstance(options, AROptions)
        texts = ("Hello", "one two three four five", "six seven eight nine ten " * 40)
        chats = [ChatPrompt((Message("user", (TextPart(text),)),)) for text in texts]
        return [Probe(chat) for chat in chats if len(self.encode(chat)) < options.max_model_len - 8]

    def _parts(self, directory: Path, config: Any, dtype: torch.dtype) -> ThinkerParts:
        dummy = self.context.load_format == "dummy"
        parts = ThinkerParts(config, dtype, initialise=dummy)
        if dummy:
            initialise_experts(parts, config.text_config.initializer_range)
        else:
            load_parts(directory, parts, PREFIX, self.context.progress)
        return parts
