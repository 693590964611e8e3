"""The tiny checkpoint's language model: bytes to code frames, and to sound through ``inference_stream``.

Upstream is transformers' ``PreTrainedModel``, so that ``AutoModelForCausalLM`` loads it as it loads the published one.
"""

import random
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel


class MossTTSNanoConfig(PretrainedConfig):  # type: ignore[misc]
    """Sizes of the model, and where its codec is; transformers' ``PretrainedConfig`` reads and writes them."""

    model_type = "moss_tts_nano"

    def __init__(
        self,
        hidden_size: int = 24,
        codebooks: int = 4,
        audio_vocab_size: int = 32,
        chunk_frames: int = 4,
        audio_tokenizer_pretrained_name_or_path: str = "audio_tokenizer",
        audio_tokenizer_sample_rate: int = 48_000,
        **kwargs: Any,
    ) -> None:
        self.hidden_size, self.codebooks, self.audio_vocab_size = hidden_size, codebooks, audio_vocab_size
        self.chunk_frames = chunk_frames
        self.audio_tokenizer_pretrained_name_or_path = audio_tokenizer_pretrained_name_or_path
        self.audio_tokenizer_sample_rate = audio_tokenizer_sample_rate
        super().__init__(**kwargs)


class MossTTSNanoForCausalLM(PreTrainedModel):  # type: ignore[misc]
    """A recurrent reader of bytes whose state then writes code frames, one for every two bytes.

    Extends transformers' ``PreTrainedModel`` with ``inference_stream``.
    """

    config_class = MossTTSNanoConfig

    def __init__(self, config: MossTTSNanoConfig) -> None:
        super().__init__(config)
        self.text = nn.Embedding(256, config.hidden_size)
        self.audio = nn.Embedding(config.audio_vocab_size, config.hidden_size)
        self.cell = nn.GRUCell(config.hidden_size, config.hidden_size)
        self.heads = nn.Linear(config.hidden_size, config.codebooks * config.audio_vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.5)

    def inference_stream(
        self,
        *,
        text: str,
        output_audio_path: str,
        mode: str,
        prompt_text: str | None,
        prompt_audio_path: str | None,
        text_tokenizer_path: str,
        audio_tokenizer: Any,
        device: torch.device,
        nq: int | None,
        max_new_frames: int,
        do_sample: bool,
        use_kv_cache: bool,
        audio_temperature: float,
        audio_top_p: float,
        audio_top_k: int,
        audio_repetition_penalty: float,
    ) -> Iterator[dict[str, Any]]:
        """Events as sound is made; speech shorter than one chunk comes in the last one alone.

        Draws from torch's, numpy's and ``random``'s global generators, as upstream's code may.
        """
        if mode not in ("voice_clone", "continuation") or (mode == "voice_clone") != (
            prompt_audio_path is not None and prompt_text is None
        ):
            raise ValueError(f"mode {mode!r} does not fit the prompt")
        state = torch.zeros(1, self.config.hidden_size)
        read = (prompt_text or "").encode() + self._heard(prompt_audio_path)
        for byte in text.encode():
            state = self.cell(self.text(torch.tensor([byte])), state)
        voice = self.text(torch.tensor(list(read))).mean(0, keepdim=True) if read else 0.0
        frames = min(max_new_frames, len(text.encode()) // 2 + 1)
        pending: list[Tensor] = []
        sound: list[Tensor] = []
        audio_tokenizer.reset()
        answer = open(output_audio_path, "wb")  # noqa: SIM115 closed below, whatever happens
        try:
            for _ in range(frames):
                codes = self._codes(state, do_sample, audio_temperature, audio_top_k)
                state = self.cell(self.audio(codes).mean(0, keepdim=True) + voice, state)
                pending.append(codes)
                if len(pending) == self.config.chunk_frames:
                    sound.append(audio_tokenizer.decode(torch.stack(pending)))
                    pending.clear()
                    yield self._event("audio", sound[-1])
            if pending:
                sound.append(audio_tokenizer.decode(torch.stack(pending)))
                if len(sound) > 1:
                    yield self._event("audio", sound[-1])
            if len(sound) > 1:
                yield self._event("audio", torch.zeros(2, 0))
            yield self._event("result", torch.cat(sound, dim=1))
        finally:
            audio_tokenizer.reset()
            answer.close()

    def _heard(self, path: str | None) -> bytes:
        """The loudness of a recording, a byte for each tenth of a second."""
        if path is None:
            return b""
        with wave.open(path) as recording:
            heard = np.frombuffer(recording.readframes(-1), "<i2").astype(np.float32) / 32768
        return bytes(int(255 * np.abs(part).mean()) for part in np.array_split(heard, len(heard) // 4800 + 1))

    def _codes(self, state: Tensor, do_sample: bool, temperature: float, top_k: int) -> Tensor:
        """One frame [codebooks]."""
        logits: Tensor = self.heads(state).view(self.config.codebooks, -1) / temperature
        if not do_sample:
            return logits.argmax(-1)
        logits = logits + 1e-3 * (random.random() + float(np.random.random()))
        if 0 < top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
        shift = int(np.random.randint(2)) * (random.random() < 0.5)
        size: int = self.config.audio_vocab_size
        return (torch.multinomial(logits.softmax(-1), 1)[:, 0] + shift) % size

    def _event(self, kind: str, waveform: Tensor) -> dict[str, Any]:
        return {"type": kind, "waveform": waveform, "sample_rate": self.config.audio_tokenizer_sample_rate}
