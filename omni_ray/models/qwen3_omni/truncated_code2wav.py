"""Upstream's way to stream code2wav: windows that begin some frames before the new ones. Approximate; for comparison.

The pre-transformer looks back ``layers * (window - 1)`` frames, 568 at the published shape, so a window that begins 25
frames back does not give what one call gives. vLLM-Omni and transformers' ``chunked_decode`` accept that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_ray.engine.codec import Samples
from omni_ray.engine.frame_codec import Codes, FrameDecoder, padded_codes
from omni_ray.models.qwen3_omni.streaming_code2wav import tail_samples


@dataclass(frozen=True, slots=True)
class Recent:
    """The last frames of a request, int64 [at most the left context, Q]."""

    frames: Codes


class TruncatedCode2Wav(FrameDecoder):
    """Decodes each chunk together with up to ``left`` frames before it, by an unchanged ``Qwen3OmniMoeCode2Wav``.

    Windows are vLLM-Omni's; unlike ``chunked_decode`` the samples that each window lacks at its end (555) come with the
    next one, so the length is that of one call.
    """

    def __init__(self, model: Qwen3OmniMoeCode2Wav, left: int) -> None:
        self._model = model
        self._left = left
        self._tail = tail_samples(model.config.upsample_rates)
        self._samples_per_frame = int(model.total_upsample)

    def windows(self, pasts: Sequence[Recent | None], codes: Sequence[Codes]) -> list[tuple[Codes, int]]:
        """For each request the frames to decode and how many of them are context."""
        contexts = [frames[:0] if past is None else past.frames for past, frames in zip(pasts, codes, strict=True)]
        return [(np.concatenate([c, f]), len(c)) for c, f in zip(contexts, codes, strict=True)]

    @torch.inference_mode()
    def step(self, pasts: Sequence[Recent | None], codes: Sequence[Codes]) -> list[tuple[Samples, Recent]]:
        """See ``StreamingCode2Wav.step``; as many samples, of other values."""
        windows = self.windows(pasts, codes)
        padded = padded_codes([window for window, _ in windows], max(len(window) for window, _ in windows))
        sound = self._model(torch.from_numpy(padded).to(self._model.device))[:, 0].float().cpu().numpy()
        done = []
        for row, (window, context) in zip(sound, windows, strict=True):
            start = max(0, context * self._samples_per_frame - self._tail)
            end = len(window) * self._samples_per_frame - self._tail
            done.append((row[start:end].copy(), Recent(window[len(window) - min(len(window), self._left) :])))
        return done
