"""The tiny checkpoint's codec: code frames to stereo sound at 48 kHz, 3840 samples each, state on the module.

Upstream is transformers' ``PreTrainedModel``, so that ``AutoModel`` loads it as it loads the published codec.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel


class MossAudioTokenizerConfig(PretrainedConfig):  # type: ignore[misc]
    """Sizes of the codec; transformers' ``PretrainedConfig`` reads and writes them."""

    model_type = "moss_audio_tokenizer"

    def __init__(self, codebooks: int = 4, codebook_size: int = 32, hidden_size: int = 16, **kwargs: Any) -> None:
        self.codebooks, self.codebook_size, self.hidden_size = codebooks, codebook_size, hidden_size
        super().__init__(**kwargs)


class MossAudioTokenizerModel(PreTrainedModel):  # type: ignore[misc]
    """A sum of embeddings, and one transposed convolution whose windows overlap by half: each call keeps a tail.

    Extends transformers' ``PreTrainedModel`` with ``decode``.
    """

    config_class = MossAudioTokenizerConfig
    frame = 3840

    def __init__(self, config: MossAudioTokenizerConfig) -> None:
        super().__init__(config)
        self.books = nn.ModuleList(
            nn.Embedding(config.codebook_size, config.hidden_size) for _ in range(config.codebooks)
        )
        self.decoder = nn.Conv1d(config.hidden_size, 2 * 2 * self.frame, 1)
        self.tail: Tensor | None = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding | nn.Conv1d):
            nn.init.normal_(module.weight, std=0.1)

    def reset(self) -> None:
        """Forget what was decoded."""
        self.tail = None

    def decode(self, codes: Tensor) -> Tensor:
        """Codes [n, codebooks] to samples [2, n * 3840] that continue those of the call before."""
        hidden = sum(book(codes[:, i]) for i, book in enumerate(self.books))
        windows = torch.tanh(self.decoder(hidden.T[None])[0].T.reshape(len(codes), 2, 2 * self.frame))
        tail = torch.zeros(2, self.frame) if self.tail is None else self.tail
        made = []
        for window in windows:
            made.append(window[:, : self.frame] + tail)
            tail = window[:, self.frame :]
        self.tail = tail
        return torch.cat(made, dim=1) / 4
