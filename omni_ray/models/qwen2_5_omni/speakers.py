"""A checkpoint's speakers: ``spk_dict.pt`` beside the weights, the only place where they are.

The file is a pickle. It is read by torch's restricted loader (``weights_only``), which runs none of its code, and what
comes out is checked before anything uses it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from omni_ray.errors import ConfigError, InvalidRequestError

SPEAKER_FILE: Final = "spk_dict.pt"
MOST_BYTES: Final = 64 * 2**20
"""Two published speakers are far below a megabyte."""
FIELDS: Final = frozenset(("bos_token", "cond", "ref_mel"))


@dataclass(frozen=True, slots=True)
class Speaker:
    """One voice.

    Attributes:
        bos_token: thinker id that opens the text in front of the talker.
        cond: float32 [1, enc_emb_dim], the speaker's embedding.
        ref_mel: float32 [1, frames, mel_dim], the log-mel spectrogram of a recording.
    """

    bos_token: int
    cond: Tensor
    ref_mel: Tensor


class Speakers:
    """A checkpoint's voices by name; names are compared in any case."""

    def __init__(self, speakers: dict[str, Speaker]) -> None:
        """The first of ``speakers`` is the default."""
        self.names = tuple(speakers)
        self._speakers = speakers
        self._known = {name.casefold(): name for name in speakers}

    def named(self, name: str | None) -> str:
        """A voice as the checkpoint spells it; None is the default.

        Raises:
            InvalidRequestError: the checkpoint has no such voice.
        """
        if name is None:
            return self.names[0]
        if name.casefold() not in self._known:
            raise InvalidRequestError(f"unknown voice {name!r}; this model has {', '.join(self.names)}", "voice")
        return self._known[name.casefold()]

    def of(self, name: str | None) -> Speaker:
        """The voice of a request; raises what ``named`` does."""
        return self._speakers[self.named(name)]


def load_speakers(model: str, directory: Path, config: Any) -> Speakers:
    """Read and check the speakers.

    Args:
        model: directory or hub id of the checkpoint.
        directory: where its other files are.
        config: transformers' ``Qwen2_5OmniConfig`` of it.

    Raises:
        ConfigError: the file is missing, holds anything but numbers and names, or a speaker does not fit the config.
    """
    path = _file(model, directory)
    if path.stat().st_size > MOST_BYTES:
        raise ConfigError([f"{path} has {path.stat().st_size} bytes; speakers take at most {MOST_BYTES}"])
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's loader raises whatever the file makes it meet
        raise ConfigError([f"{path} is no file of speakers that can be read safely: {error}"]) from error
    if not isinstance(loaded, dict) or not loaded:
        raise ConfigError([f"{path} must hold a mapping of names to speakers, not {type(loaded).__name__}"])
    problems: list[str] = []
    speakers = {}
    for name, fields in loaded.items():
        try:
            if not isinstance(name, str):
                raise ValueError(f"a name must be a text, not {type(name).__name__}")
            speakers[name] = _speaker(fields, config)
        except ValueError as error:
            problems.append(f"{path}: speaker {name!r}: {error}")
    if problems:
        raise ConfigError(problems)
    return Speakers(speakers)


def random_speakers(config: Any) -> Speakers:
    """Two voices of noise, for ``load_format: dummy``."""
    dit = config.token2wav_config.dit_config
    noise = torch.Generator().manual_seed(0)
    bos = config.talker_config.tts_text_start_token_id
    return Speakers(
        {
            name: Speaker(
                bos,
                torch.randn(1, dit.enc_emb_dim, generator=noise),
                torch.randn(1, 300, dit.mel_dim, generator=noise),
            )
            for name in ("Chelsie", "Ethan")
        }
    )


def _file(model: str, directory: Path) -> Path:
    path = directory / SPEAKER_FILE
    if path.is_file():
        return path
    if not Path(model).expanduser().is_dir():
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(model, SPEAKER_FILE))
        except Exception as error:  # its errors have no common base: offline, gated, not found, no space
            raise ConfigError([f"model {model!r}: {SPEAKER_FILE} cannot be fetched from the hub: {error}"]) from error
    raise ConfigError([f"{directory} has no {SPEAKER_FILE}: without its speakers this checkpoint cannot speak"])


def _speaker(fields: Any, config: Any) -> Speaker:
    """Check one speaker; ``ValueError`` says what is wrong."""
    missing = FIELDS - fields.keys() if isinstance(fields, dict) else FIELDS
    if missing:
        raise ValueError(f"lacks {', '.join(sorted(missing))}")
    bos, rows = fields["bos_token"], config.thinker_config.text_config.vocab_size
    if isinstance(bos, bool) or not isinstance(bos, int) or not 0 <= bos < rows:
        raise ValueError(f"bos_token must be an id below {rows}, not {bos!r}")
    dit = config.token2wav_config.dit_config
    cond, ref_mel = _numbers("cond", fields["cond"]), _numbers("ref_mel", fields["ref_mel"])
    if cond.numel() != dit.enc_emb_dim:
        raise ValueError(f"cond has {cond.numel()} numbers, not {dit.enc_emb_dim}")
    # The speaker encoder's convolutions reflect their input at both ends.
    reach = max(d * (k - 1) // 2 for k, d in zip(dit.enc_kernel_sizes, dit.enc_dilations, strict=True))
    if ref_mel.shape[-1:] != (dit.mel_dim,) or ref_mel.numel() <= reach * dit.mel_dim:
        raise ValueError(f"ref_mel has shape {list(ref_mel.shape)}, not [over {reach}, {dit.mel_dim}]")
    return Speaker(bos, cond.reshape(1, -1), ref_mel.reshape(1, -1, dit.mel_dim))


def _numbers(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise ValueError(f"{name} must be a tensor of floating-point numbers")
    if not torch.isfinite(value).all():
        raise ValueError(f"{name} holds NaN or infinity")
    return value.float()
