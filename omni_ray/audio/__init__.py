"""Decoding, resampling, PCM and containers (soundfile, soxr); the only place that touches samples' formats.

    request:  decode_base64 -> decode_audio -> float32 [n] mono at the pipeline's rate
    response: float32 [n] or [n, channels] -> StreamResampler -> open_encoder(...).write/finish -> bytes

Samples are float32 in [-1, 1] everywhere outside this package. It does not know requests, stages or HTTP, and it never
blocks on anything but the CPU: the caller keeps it off the event loop.
"""

from omni_ray.audio.decoding import decode_audio, decode_base64
from omni_ray.audio.encoders import Encoder, open_encoder
from omni_ray.audio.formats import FORMATS, AudioFormat, find_format
from omni_ray.audio.samples import StreamResampler, check_finite, pcm16

__all__ = [
    "FORMATS",
    "AudioFormat",
    "Encoder",
    "StreamResampler",
    "check_finite",
    "decode_audio",
    "decode_base64",
    "find_format",
    "open_encoder",
    "pcm16",
]
