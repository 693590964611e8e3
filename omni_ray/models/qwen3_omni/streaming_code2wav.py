"""code2wav that goes on where it stopped: a request's frames may come in any pieces, the samples are those of one call.

transformers' ``Qwen3OmniMoeCode2Wav`` decodes one whole tensor of codes. It looks back in two kinds of places only: the
attention of its pre-transformer (the last ``sliding_window`` frames, in each layer) and its convolutions (the last few
inputs of each). Here both kinds of modules are replaced by ones that carry that past from call to call; weights, their
names and everything else stay upstream's (MODEL-INV-003). Nothing is decoded twice.

What each call gives: a transposed convolution needs the input after the one it stands at, so each of the four lacks its
last stride of outputs until the next input comes. Together they lag ``tail_samples`` (555) behind: n frames decode to
``1920 n - 555`` samples, and each later call also brings the samples that the one before it lacked.

Shapes: B rows (requests), n frames of the longest row, Q codebooks, C channels, T positions of a layer in time.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2Wav,
)

from omni_ray.engine.carrying import (
    Carried,
    CarryingAttention,
    CarryingConv,
    CarryingTransConv,
    Layout,
    Past,
    Scope,
)
from omni_ray.engine.codec import Samples
from omni_ray.engine.frame_codec import Codes, FrameDecoder, padded_codes


def tail_samples(upsample_rates: Sequence[int]) -> int:
    """Samples by which one call is shorter than ``frames * samples per frame``; 555 for rates 8, 5, 4, 3."""
    tail = 0
    for rate in upsample_rates:
        tail = (tail + 1) * rate
    return tail


class StreamingCode2Wav(FrameDecoder):
    """Steps an upstream ``Qwen3OmniMoeCode2Wav``, whose carrying modules it replaces, for many requests at once.

    Attributes:
        samples_per_frame: 1920.
        codebooks: Q.
        sizes: numbers that one request carries: keys and values, inputs.
        tail: samples that are held back until the next frame (555).
    """

    def __init__(self, model: Qwen3OmniMoeCode2Wav) -> None:
        """Take over ``model``, with or without its weights loaded: their names do not change.

        Raises:
            ValueError: a convolution of a kind that upstream does not have today.
        """
        config = model.config
        self._model = model
        self._scope = Scope()
        self._window: int = config.sliding_window
        layout = Layout()
        for layer in model.pre_transformer.layers:
            heads, dim = config.num_key_value_heads, layer.self_attn.head_dim
            key, value = (layout.next(heads, self._window - 1, dim) for _ in range(2))
            layer.self_attn = CarryingAttention(layer.self_attn, self._scope, key, value)
        keys_values_size = layout.size
        layout = Layout()
        for part in (model.upsample, model.decoder):
            self._replace(part, layout)
        self.sizes = (keys_values_size, layout.size)
        self.codebooks: int = config.num_quantizers
        self.samples_per_frame = layout.rate
        self.tail = layout.early
        assert self.samples_per_frame == prod((*config.upsampling_ratios, *config.upsample_rates))
        assert self.tail == tail_samples(config.upsample_rates)
        weight = model.code_embedding.weight
        self._nothing = Past(0, *(weight.new_zeros(size) for size in self.sizes))

    def _replace(self, parent: nn.Module, layout: Layout) -> None:
        """Replace the convolutions under ``parent``; a child runs after the children before it."""
        for name, child in list(parent.named_children()):
            if isinstance(child, Qwen3OmniMoeCausalConvNet):
                if child.stride != 1:
                    raise ValueError(f"{name}: a causal convolution of stride {child.stride}")
                if child.padding:
                    place = layout.next(child.conv.in_channels, child.padding)
                    parent.register_module(name, CarryingConv(child.conv, self._scope, place))
            elif isinstance(child, Qwen3OmniMoeCausalTransConvNet):
                (kernel,), (stride,) = child.conv.kernel_size, child.conv.stride
                if kernel == 2 * stride:
                    place = layout.next(child.conv.in_channels, 1)
                    parent.register_module(name, CarryingTransConv(child.conv, self._scope, place))
                    layout.early = (layout.early + 1) * stride
                elif kernel == stride:  # every output has one input: nothing to carry
                    layout.early *= stride
                else:
                    raise ValueError(f"{name}: a transposed convolution of kernel {kernel} and stride {stride}")
                layout.rate *= stride
            else:
                self._replace(child, layout)

    @torch.inference_mode()
    def step(self, pasts: Sequence[Past | None], codes: Sequence[Codes]) -> list[tuple[Samples, Past]]:
        """Decode the next frames of several requests, each at its own age, in one batch.

        Args:
            pasts: what the last step gave for each request; None at its start.
            codes: int64 [n, Q] of each, n >= 1.

        Returns:
            For each the samples that are now final, float32 [m] in [-1, 1], and what to give to its next step. m is
            ``n * samples_per_frame``, at the start less by ``tail``.
        """
        before = [past or self._nothing for past in pasts]
        device = self._nothing.inputs.device
        ages = torch.tensor([past.frames for past in before], device=device)
        new_frames = torch.tensor([len(frames) for frames in codes], device=device)
        padded = torch.from_numpy(padded_codes(codes, max(map(len, codes)))).to(device)
        keys_values = torch.stack([past.keys_values for past in before])
        inputs = torch.stack([past.inputs for past in before])
        sound, *after = self.advance(padded, ages, new_frames, keys_values, inputs)
        samples = sound.float().cpu().numpy()
        done = []
        for row, past, frames, kv, conv in zip(samples, before, codes, *after, strict=True):
            # copies: a view would keep the whole batch alive
            sample = self.fresh(row, past.frames, len(frames)).copy()
            done.append((sample, Past(past.frames + len(frames), kv.clone(), conv.clone())))
        return done

    def fresh(self, sound: Samples, age: int, frames: int) -> Samples:
        """Of a row's sound those samples that became final with ``frames`` new frames after ``age`` others."""
        return sound[0 if age else self.tail : frames * self.samples_per_frame]

    def advance(
        self, codes: Tensor, ages: Tensor, new_frames: Tensor, keys_values: Tensor, inputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The computation of a step; a fixed sequence of kernels for given shapes.

        Args:
            codes: int64 [B, Q, n], padded.
            ages: int64 [B], frames before.
            new_frames: int64 [B], of which the rest are padding.
            keys_values: [B, size], of the frames before.
            inputs: likewise.

        Returns:
            Sound [B, n * samples_per_frame], and both kinds of past behind the new frames.
        """
        first = ages == 0
        carried = Carried(inputs, new_frames, first), Carried(keys_values, new_frames, first)
        self._scope.inputs, self._scope.keys_values = carried
        try:
            sound = self._forward(codes, ages)
            return sound, carried[1].after(), carried[0].after()
        finally:
            self._scope.inputs = self._scope.keys_values = self._scope.rotary = self._scope.visible = None

    def _forward(self, codes: Tensor, ages: Tensor) -> Tensor:
        """As ``Qwen3OmniMoeCode2Wav.forward``: codes [B, Q, n] at frames ``ages`` [B] -> [B, n * samples_per_frame]."""
        model, scope = self._model, self._scope
        hidden: Tensor = model.code_embedding(codes + model.code_offset).mean(1)
        positions = ages[:, None] + torch.arange(codes.shape[-1], device=codes.device)
        scope.rotary = model.pre_transformer.rotary_emb(hidden, positions)
        keys = ages[:, None] + torch.arange(1 - self._window, codes.shape[-1], device=codes.device)
        behind = positions[:, :, None] - keys[:, None]
        scope.visible = ((behind >= 0) & (behind < self._window) & (keys >= 0)[:, None])[:, None]
        for layer in model.pre_transformer.layers:
            hidden = layer(hidden)
        hidden = model.pre_transformer.norm(hidden).transpose(1, 2)
        for block in (*(block for blocks in model.upsample for block in blocks), *model.decoder):
            hidden = block(hidden)
        return hidden[:, 0].clamp(min=-1, max=1)
