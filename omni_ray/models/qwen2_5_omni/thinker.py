"""The thinker: Qwen2.5-Omni's text model with ears and eyes, over static KV slots.

Towers, norms, MLPs and rotary tables are transformers'; attention over slots is ``SlotDecoder``'s, the expansion of
placeholders ours. Tokens equal upstream's ``generate``.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAudioEncoder,
    Qwen2_5OmniThinkerTextModel,
    Qwen2_5OmniVisionEncoder,
)

from omni_ray.engine.ar_model import PREFILL_CHUNK, Probe
from omni_ray.engine.checkpoint_files import load_parts
from omni_ray.engine.fixed_shapes import ELEMENTS, POSITIONS, rounded_up
from omni_ray.engine.options import AROptions
from omni_ray.engine.precision import compute_dtype
from omni_ray.engine.slot_decoder import SlotDecoder
from omni_ray.engine.text_tokens import stop_ids, token_bytes
from omni_ray.engine.transformers_build import build
from omni_ray.engine.types import Chunk, LatentChunk, Message, PromptChunk, TextPart
from omni_ray.models.qwen2_5_omni.latent_engine import LatentTextModel
from omni_ray.models.qwen2_5_omni.media import MediaReader, Towers
from omni_ray.models.qwen2_5_omni.prompt import ChatPrompt
from omni_ray.models.qwen2_5_omni.stage_checkpoint import stage_checkpoint
from omni_ray.models.qwen2_5_omni.thinker_prompt import Piece, PromptMaker, ThinkerPrompt, chat_template

PREFIX: Final = "thinker."
TOOL_CALL: Final = ("<tool_call>", "</tool_call>")
"""Tokens around what is written but not spoken (cases.md C40)."""


class ThinkerParts(nn.Module):
    """The thinker's modules under the names that checkpoints give them."""

    def __init__(self, config: Any, dtype: torch.dtype, *, initialise: bool) -> None:
        super().__init__()
        text = config.text_config
        if "head_dim" not in vars(text):
            text.head_dim = text.hidden_size // text.num_attention_heads  # no field of the class; upstream divides too
        self.audio_tower = build(Qwen2_5OmniAudioEncoder, config.audio_config, dtype, initialise=initialise)
        self.visual = build(Qwen2_5OmniVisionEncoder, config.vision_config, dtype, initialise=initialise)
        self.model = build(Qwen2_5OmniThinkerTextModel, text, dtype, initialise=initialise)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False, dtype=dtype)
        if initialise:
            nn.init.normal_(self.lm_head.weight, std=text.initializer_range)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight


class Qwen2_5OmniThinker(LatentTextModel):
    """``ChatPrompt`` in; text out, and latent rows [hidden]: one for each position of the prompt, then one per token.

    A row is the position's embedding plus its hidden state behind the last norm: all that the talker hears. The
    embeddings of media placeholders do not count. First comes a ``PromptChunk``, then the prompt's rows in one
    ``LatentChunk`` that ends segment 0; the answer's rows are segment 1. A checkpoint without audio output gives the
    ``PromptChunk`` only.

    Deterministic mode gives every call a fixed shape. Towers always compute one request at a time.
    """

    def load(self) -> None:
        """Load the checkpoint's ``thinker.`` tensors, or draw random ones (``load_format: dummy``), and warm up.

        Raises:
            ConfigError: no model, a tensor is missing or unexpected, or ``max_model_len`` exceeds the checkpoint's.
        """
        options = self.context.options
        assert isinstance(options, AROptions)
        _, directory, config = stage_checkpoint(self.context, lambda c: c.thinker_config.text_config, speaks=False)
        torch.set_num_threads(options.threads)
        self._deterministic, self._speaks = options.deterministic, config.enable_audio_output
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.stop_ids = stop_ids(directory, tokenizer)
        self._bytes = token_bytes(tokenizer)
        template, reader = chat_template(directory, tokenizer), MediaReader(directory)
        self._maker = PromptMaker(tokenizer, template, config.thinker_config, reader, options.max_model_len)
        self._encoding = threading.Lock()
        self._silent = frozenset(index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
        known = tokenizer.get_vocab()
        self._spans = ((known[TOOL_CALL[0]], known[TOOL_CALL[1]]),) if TOOL_CALL[0] in known else ()
        parts = self._parts(directory, config.thinker_config, compute_dtype(options.dtype))
        self._towers = Towers(parts.audio_tower, parts.visual)
        self._embedding, self._head = parts.model.embed_tokens.weight, parts.lm_head
        fixed = self._deterministic
        slots = rounded_up(options.max_num_seqs, ELEMENTS if fixed else 1)
        # One position more than any request needs: rows that are not wanted in a step write there.
        self._decoder = SlotDecoder(
            parts.model, slots, rounded_up(options.max_model_len + 1, POSITIONS if fixed else 1)
        )
        self._prompts: list[ThinkerPrompt | None] = [None] * slots
        self._prompt_rows: list[list[Tensor]] = [[] for _ in range(slots)]
        self._row: list[tuple[int, Tensor] | None] = [None] * slots
        self.step([0], [0], [0])
        self._row[0] = None

    def _parts(self, directory: Path, config: Any, dtype: torch.dtype) -> ThinkerParts:
        dummy = self.context.load_format == "dummy"
        parts = ThinkerParts(config, dtype, initialise=dummy)
        if not dummy:
            load_parts(directory, parts, PREFIX, self.context.progress)
        return parts.requires_grad_(False)

    def encode(self, prompt: Any) -> ThinkerPrompt:
        """Tokens and positions of a ``ChatPrompt``, and its media heard and seen."""
        assert isinstance(prompt, ChatPrompt)
        with self._encoding:  # tokenizers change their own state for truncation and padding
            prepared = self._maker.make(prompt)
        prepared.perceive(self._towers)
        return prepared

    def penalised(self, prompt: ThinkerPrompt) -> Sequence[int]:
        """See ``ARModel.penalised``."""
        return prompt.ids

    def detokenize(self, token_id: int) -> bytes:
        """See ``ARModel.detokenize``; the output projection has more rows than the tokenizer has tokens."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def begin(self, slot: int, prompt: ThinkerPrompt) -> int:
        """Remember the prompt; nothing of it is in the slot."""
        self._prompts[slot], self._prompt_rows[slot], self._row[slot] = prompt, [], None
        return 0

    def prefill(self, slot: int, ids: Piece, start: int) -> Tensor:
        """See ``ARModel.prefill``."""
        piece, count = ids, len(ids.ids)
        reach, axes, tokens = start + count, piece.axes, list(piece.ids)
        if self._deterministic:
            # The padding writes beyond the prompt, where the answer will overwrite it before anyone looks.
            padding = min(PREFILL_CHUNK, self._decoder.length - start) - count
            tokens, axes, reach = [*tokens, *[0] * padding], F.pad(axes, (0, padding)), self._decoder.length
        x = F.embedding(torch.tensor(tokens), self._embedding)
        said = x.clone()
        if piece.media is not None:
            x[piece.media_at], said[piece.media_at] = piece.media.to(x.dtype), 0
        places = torch.arange(start, start + len(tokens))[None]
        hidden = self._decoder.forward(x[None], axes[:, None], places, range(slot, slot + 1), reach)[0]
        if self._speaks:
            self._prompt_rows[slot].append((hidden + said)[:count].float())
        return self._logits(hidden[count - 1])

    def prompt_outputs(self, slot: int) -> Sequence[Chunk]:
        """What was asked, and its rows."""
        prompt = self._prompts[slot]
        assert prompt is not None
        grids = tuple((1, grid.height, grid.width, 1.0) for grid in prompt.grids)
        rows, self._prompt_rows[slot] = self._prompt_rows[slot], []
        asked = PromptChunk(
            0, tuple(prompt.ids), grids, len(prompt) if rows else 0, silent=self._silent, silent_spans=self._spans
        )
        return [asked, LatentChunk(0, torch.cat(rows).numpy(), ends_segment=True)] if rows else [asked]

    def step(self, slots: Sequence[int], last_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """See ``ARModel.step``.

        Slots between the first and the last one that are not wanted are computed too and thrown away: gathering KV
        would cost more. They write at the last place, which is nobody's.
        """
        length = self._decoder.length
        rows = range(self._decoder.slots) if self._deterministic else range(slots[0], slots[-1] + 1)
        ids, where, at = [0] * len(rows), [length - 1] * len(rows), [0.0] * len(rows)
        taken = [slot - rows.start for slot in slots]
        for row, slot, token, position in zip(taken, slots, last_ids, positions, strict=True):
            prompt = self._prompts[slot]
            ids[row], where[row], at[row] = token, position, position + (0.0 if prompt is None else prompt.rope.delta)
        x = F.embedding(torch.tensor(ids)[:, None], self._embedding)
        axes = torch.tensor(at, dtype=torch.float32)[None, :, None].repeat(3, 1, 1)
        reach = length if self._deterministic else max(positions) + 1
        hidden = self._decoder.forward(x, axes, torch.tensor(where)[:, None], rows, reach)[:, 0]
        logits = self._logits(hidden)
        if self._speaks:
            latents = (hidden + x[:, 0]).float()
            for row, slot, position in zip(taken, slots, positions, strict=True):
                self._row[slot] = position, latents[row]
        return logits if len(taken) == len(rows) else logits[taken]

    def take_row(self, slot: int) -> Sequence[LatentChunk]:
        """See ``LatentTextModel.take_row``; ``position`` counts the prompt's rows too."""
        made, self._row[slot] = self._row[slot], None
        return () if made is None else [LatentChunk(made[0], made[1].numpy()[None], segment=1)]

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden).float()
        return logits

    def kv_bytes(self) -> int:
        """See ``SlotModel.kv_bytes``."""
        return self._decoder.keys.nbytes + self._decoder.values.nbytes

    def encoder_bytes(self) -> int:
        """See ``SlotModel.encoder_bytes``."""
        return sum(prompt.feature_bytes() for prompt in list(self._prompts) if prompt is not None)

    def release(self, slot: int) -> None:
        """Drop the prompt's features and rows; the KV is overwritten by the slot's next request."""
        self._prompts[slot], self._prompt_rows[slot], self._row[slot] = None, [], None

    def probes(self) -> Sequence[Probe]:
        """Texts of different lengths, one of them longer than a prefill piece, as far as they fit."""
        options = self.context.options
        assert isinstance(options, AROptions)
        texts = ("Hello", "one two three four five", "six seven eight nine ten " * 40)
        chats = [ChatPrompt((Message("user", (TextPart(text),)),)) for text in texts]
        return [Probe(chat) for chat in chats if len(self.encode(chat)) < options.max_model_len - 8]
