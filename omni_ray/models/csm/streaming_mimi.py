"""Mimi's decoder that goes on where it stopped: a request's frames may come in any pieces, the samples are those of
one call.

transformers' ``MimiModel.decode`` looks back in two kinds of places only: the attention of its transformer (the last
``sliding_window`` positions, two a frame) and its convolutions. Here both kinds of modules are replaced by ones that
carry that past from call to call; weights, their names and everything else stay upstream's (MODEL-INV-003). Upstream's
own ``decoder_past_key_values`` carries the attention's past alone, so its chunks do not add up to one call.

All its convolutions are padded on the left and trimmed on the right only, so n frames give 1920 n samples at once.

Shapes: B rows (requests), n frames of the longest row, Q codebooks, T positions of a layer in time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mimi.modeling_mimi import MimiConv1d, MimiConvTranspose1d

from omni_ray.engine.carrying import Carried, CarryingAttention, CarryingConv, CarryingTransConv, Layout, Past, Scope
from omni_ray.engine.codec import Samples
from omni_ray.engine.frame_codec import Codes, FrameDecoder, padded_codes


class StreamingMimi(FrameDecoder):
    """Steps the decoding half of an upstream ``MimiModel``, whose carrying modules it replaces, for many requests.

    Attributes:
        samples_per_frame: 1920 at the published shape.
    """

    def __init__(self, model: Any) -> None:
        """Take over a ``MimiModel``, with or without its weights loaded: their names do not change.

        Raises:
            ValueError: a convolution of a kind that upstream does not have today.
        """
        self._model, self._scope = model, Scope()
        config = model.config
        layout = Layout()
        model.upsample = self._replaced("upsample", model.upsample, layout)
        self._positions_per_frame = layout.rate
        self._replace(model.decoder, layout)
        self.samples_per_frame = layout.rate
        self._window: int = config.sliding_window
        attention = Layout(rate=self._positions_per_frame)
        for layer in model.decoder_transformer.layers:
            heads, dim = config.num_key_value_heads, layer.self_attn.head_dim
            key, value = (attention.next(heads, self._window - 1, dim) for _ in range(2))
            layer.self_attn = CarryingAttention(layer.self_attn, self._scope, key, value)
        weight = next(model.decoder.parameters())
        self._nothing = Past(0, weight.new_zeros(attention.size), weight.new_zeros(layout.size))

    def _replace(self, parent: nn.Module, layout: Layout) -> None:
        """Replace the convolutions under ``parent``; a child runs after the children before it."""
        for name, child in list(parent.named_children()):
            if isinstance(child, MimiConv1d | MimiConvTranspose1d):
                parent.register_module(name, self._replaced(name, child, layout))
            else:
                self._replace(child, layout)

    def _replaced(self, name: str, module: nn.Module, layout: Layout) -> nn.Module:
        if isinstance(module, MimiConv1d):
            conv = module.conv
            (kernel,), (stride,), (dilation,) = conv.kernel_size, conv.stride, conv.dilation
            if stride != 1:
                raise ValueError(f"{name}: a causal convolution of stride {stride}")
            keep = (kernel - 1) * dilation
            return CarryingConv(conv, self._scope, layout.next(conv.in_channels, keep)) if keep else module
        assert isinstance(module, MimiConvTranspose1d)
        (kernel,), (stride,) = module.conv.kernel_size, module.conv.stride
        if kernel != 2 * stride:
            raise ValueError(f"{name}: a transposed convolution of kernel {kernel} and stride {stride}")
        place = layout.next(module.conv.in_channels, 1)
        layout.rate *= stride
        return CarryingTransConv(module.conv, self._scope, place)

    @torch.inference_mode()
    def step(self, pasts: Sequence[Past | None], codes: Sequence[Codes]) -> list[tuple[Samples, Past]]:
        """Decode the next frames of several requests, each at its own age, in one batch.

        Args:
            pasts: what the last step gave for each request; None at its start.
            codes: int64 [n, Q] of each, n >= 1.

        Returns:
            For each its samples, float32 [n * samples_per_frame], and what to give to its next step.
        """
        before = [past or self._nothing for past in pasts]
        device = self._nothing.inputs.device
        padded = padded_codes(codes, max(map(len, codes)))
        ages = torch.tensor([past.frames for past in before], device=device)
        new_frames = torch.tensor([len(frames) for frames in codes], device=device)
        first = ages == 0
        inputs = Carried(torch.stack([past.inputs for past in before]), new_frames, first)
        keys_values = Carried(torch.stack([past.keys_values for past in before]), new_frames, first)
        self._scope.inputs, self._scope.keys_values = inputs, keys_values
        try:
            sound = self._forward(torch.from_numpy(padded).to(device), ages)
        finally:
            self._scope.inputs = self._scope.keys_values = self._scope.rotary = self._scope.visible = None
        after = zip(keys_values.after(), inputs.after(), strict=True)
        samples = sound.float().cpu().numpy()
        done = []
        for row, past, frames, (kv, conv) in zip(samples, before, codes, after, strict=True):
            sample = row[: len(frames) * self.samples_per_frame].copy()  # a view would keep the whole batch alive
            done.append((sample, Past(past.frames + len(frames), kv.clone(), conv.clone())))
        return done

    def _forward(self, codes: Tensor, ages: Tensor) -> Tensor:
        """As ``MimiModel._decode_frame``: codes [B, Q, n] at frames ``ages`` [B] -> [B, n * samples_per_frame]."""
        model, scope, rate = self._model, self._scope, self._positions_per_frame
        hidden: Tensor = model.upsample(model.quantizer.decode(codes)).transpose(1, 2)
        new = torch.arange(1 - self._window, hidden.shape[1], device=codes.device)
        keys = rate * ages[:, None] + new
        positions = keys[:, self._window - 1 :]
        scope.rotary = model.decoder_transformer.rotary_emb(hidden, positions)
        behind = positions[:, :, None] - keys[:, None]
        scope.visible = ((behind >= 0) & (behind < self._window) & (keys >= 0)[:, None])[:, None]
        for layer in model.decoder_transformer.layers:
            hidden = layer(hidden)[0]
        sound: Tensor = model.decoder(hidden.transpose(1, 2))[:, 0]
        return sound
