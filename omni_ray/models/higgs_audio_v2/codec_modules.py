"""The two halves of the codec, built of transformers' DAC and HuBERT under the checkpoint's own names.

Upstream's ``HiggsAudioV2TokenizerModel`` holds both, and more that only training needs; its module imports torchaudio,
whose published builds want CUDA's libraries, for one call. So what is its own is written here: the quantizer, the small
semantic encoder, and a resampler (torchaudio's default one: a sinc under a Hann window, by Smith's method). Results are
upstream's: ``tests/models/higgs_audio_v2`` compares where torchaudio can be imported.

Shapes: n frames, Q codebooks, T samples.
"""

import math
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, embedding, pad
from transformers import HubertModel
from transformers.models.dac.modeling_dac import DacDecoder, DacEncoder

LOBES: Final = 6
ROLLOFF: Final = 0.99
SEMANTIC_PADDING: Final = 160
"""Samples of silence on both sides of what HuBERT hears, as upstream."""


class Codebook(nn.Module):
    """Code vectors, a buffer of the checkpoint."""

    embed: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.register_buffer("embed", torch.zeros(config.codebook_size, config.codebook_dim))


class Quantizer(nn.Module):
    """One stage of the residual vector quantizer; without ``encodes`` it only looks codes up."""

    def __init__(self, config: Any, encodes: bool) -> None:
        super().__init__()
        self.codebook = Codebook(config)
        if encodes:
            self.project_in = nn.Linear(config.hidden_size, config.codebook_dim)
        self.project_out = nn.Linear(config.codebook_dim, config.hidden_size)

    def decode(self, codes: Tensor) -> Tensor:
        """int64 [...] -> [..., hidden]."""
        vectors: Tensor = self.project_out(embedding(codes, self.codebook.embed))
        return vectors

    def encode(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> the nearest codes, int64 [n]."""
        x, table = self.project_in(hidden), self.codebook.embed
        near: Tensor = -(x.square().sum(1, keepdim=True) - 2 * x @ table.T + table.T.square().sum(0, keepdim=True))
        return near.argmax(-1)


class Quantizers(nn.Module):
    """All of them, as the checkpoint names them."""

    def __init__(self, config: Any, encodes: bool) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList(Quantizer(config, encodes) for _ in range(config.num_quantizers))

    def stages(self) -> list[Quantizer]:
        """In order."""
        return cast(list[Quantizer], list(self.quantizers))


class CodecDecoder(nn.Module):
    """Codes to sound: what ``HiggsAudioV2TokenizerModel.decode`` computes."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.quantizer = Quantizers(config, encodes=False)
        self.fc2 = nn.Linear(config.hidden_size, config.acoustic_model_config.hidden_size)
        self.acoustic_decoder = DacDecoder(config.acoustic_model_config)
        # As upstream's `_adjust_dac_decoder`: n positions give exactly n * stride, and nothing bounds the samples.
        for module in self.acoustic_decoder.modules():
            if isinstance(module, nn.ConvTranspose1d):
                module.output_padding = (module.stride[0] % 2,)
        self.acoustic_decoder.tanh = nn.Identity()

    def forward(self, codes: Tensor) -> Tensor:
        """int64 [B, n, Q] -> float [B, n * samples per frame]."""
        hidden = torch.zeros((), device=codes.device)
        for quantizer, of_book in zip(self.quantizer.stages(), codes.unbind(-1), strict=True):
            hidden = hidden + quantizer.decode(of_book)
        sound: Tensor = self.acoustic_decoder(self.fc2(hidden).transpose(1, 2))[:, 0]
        return sound

    def context(self) -> tuple[int, int]:
        """Frames before and after a frame that its samples depend on: the reach of all convolutions."""
        stages = [m for m in self.acoustic_decoder.modules() if isinstance(m, nn.Conv1d | nn.ConvTranspose1d)]
        first, last = 0, math.prod(m.stride[0] for m in stages) - 1
        for module in reversed(stages):
            kernel, stride, padding = module.kernel_size[0], module.stride[0], int(module.padding[0])
            if isinstance(module, nn.ConvTranspose1d):
                first, last = -(-(first + padding - kernel + 1) // stride), (last + padding) // stride
            else:
                reach = module.dilation[0] * (kernel - 1) // 2
                first, last = first - reach, last + reach
        return -first, last


class ResidualUnit(nn.Module):
    """As upstream's ``HiggsAudioV2TokenizerResidualUnit``."""

    def __init__(self, config: Any, channels: int, dilation: int) -> None:
        super().__init__()
        padding = (config.unit_kernel_size - 1) // 2 * dilation
        self.conv1 = nn.Conv1d(
            channels, channels, config.unit_kernel_size, padding=padding, dilation=dilation, bias=False
        )
        self.conv2 = nn.Conv1d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, n] -> the same shape."""
        elu = nn.functional.elu
        y: Tensor = self.conv2(elu(self.conv1(elu(x))))
        return x + y


class SemanticBlock(nn.Module):
    """As upstream's ``HiggsAudioV2TokenizerSemanticEncoderBlock``."""

    def __init__(self, config: Any, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.res_units = nn.ModuleList(ResidualUnit(config, before, dilation) for dilation in config.block_dilations)
        kernel = 3 if stride == 1 else 2 * stride
        self.conv = nn.Conv1d(before, after, kernel, stride=stride, padding=(kernel - 1) // 2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, before, n] -> [B, after, n / stride]."""
        for unit in self.res_units:
            x = unit(x)
        y: Tensor = self.conv(x)
        return y


class SemanticEncoder(nn.Module):
    """As upstream's ``SemanticEncoder``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.semantic_hidden_size
        self.conv = nn.Conv1d(width, width, config.kernel_size, padding=config.kernel_size // 2, bias=False)
        widths = [width, *(int(width * ratio) for ratio in config.channel_ratios)]
        steps = zip(widths, widths[1:], config.strides, strict=False)
        self.conv_blocks = nn.ModuleList(SemanticBlock(config, *step) for step in steps)

    def forward(self, x: Tensor) -> Tensor:
        """[B, hidden, n] -> the same shape, for strides of 1."""
        x = self.conv(x)
        for block in self.conv_blocks:
            x = block(x)
        return x


class CodecEncoder(nn.Module):
    """Sound to codes: what ``HiggsAudioV2TokenizerModel.encode`` computes at its highest bandwidth."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.acoustic_encoder = DacEncoder(config.acoustic_model_config)
        self.encoder_semantic = SemanticEncoder(config)
        self.semantic_model = HubertModel(config.semantic_model_config)
        self.fc = nn.Linear(config.hidden_size, config.hidden_size)
        self.quantizer = Quantizers(config, encodes=True)
        self._config = config

    def forward(self, samples: Tensor) -> Tensor:
        """float32 [T], at least a frame of them -> int64 [n, Q]."""
        config, sound = self._config, samples[None, None]
        heard = resample(samples[None], config.sample_rate, config.semantic_sample_rate)
        states = self.semantic_model(pad(heard, (SEMANTIC_PADDING,) * 2), output_hidden_states=True).hidden_states
        meaning = torch.stack(states, 1).mean(1)[:, :: max(1, config.semantic_downsample_factor)]
        semantic = self.encoder_semantic(meaning.transpose(1, 2))
        if self._acoustic_frames(len(samples)) != semantic.shape[2]:
            sound = pad(sound, (config.hop_length // 2,) * 2)
        hidden = torch.cat((self.acoustic_encoder(sound), semantic), 1)
        rest, codes = self.fc(hidden.transpose(1, 2))[0], []
        for quantizer in self.quantizer.stages():
            codes.append(quantizer.encode(rest))
            rest = rest - quantizer.decode(codes[-1])
        return torch.stack(codes, 1)

    def _acoustic_frames(self, length: int) -> int:
        for module in self.acoustic_encoder.modules():
            if isinstance(module, nn.Conv1d):
                kernel, stride, padding = module.kernel_size[0], module.stride[0], int(module.padding[0])
                length = (length + 2 * padding - module.dilation[0] * (kernel - 1) - 1) // stride + 1
        return length


def resample(samples: Tensor, rate: int, wanted: int) -> Tensor:
    """Band-limited interpolation (Smith 1984) with torchaudio's default window: [B, T] -> [B, ceil(T * wanted / rate)].

    The response of phase p of ``up`` is sinc(t) * cos(pi t / 2 LOBES)^2 over ``LOBES`` zero crossings on each side.
    """
    common = math.gcd(rate, wanted)
    down, up = rate // common, wanted // common
    if down == up:
        return samples
    band = min(down, up) * ROLLOFF
    width = math.ceil(LOBES * down / band)
    offset = torch.arange(-width, width + down, dtype=torch.float64) / down
    t = ((offset - torch.arange(up, dtype=torch.float64)[:, None] / up) * band).clamp(-LOBES, LOBES)
    response = torch.sinc(t) * torch.cos(t * math.pi / LOBES / 2).square() * (band / down)
    kernel = response.to(samples)[:, None]
    phases = conv1d(pad(samples[:, None], (width, width + down)), kernel, stride=down)
    length = math.ceil(samples.shape[-1] * up / down)
    return phases.transpose(1, 2).reshape(len(samples), -1)[:, :length]
