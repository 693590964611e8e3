"""Damaged and hostile media, thousands of them: an answer or a 400, never anything else, never slow.

A short run here; ``FUZZ=20000 pytest tests/test_fuzz_media.py`` for a long one.
"""

import base64
import contextlib
import gc
import io
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from omni_ray.audio import decode_audio, decode_base64
from omni_ray.errors import InvalidRequestError
from omni_ray.image import decode_image

RUNS = int(os.environ.get("FUZZ", "120"))
MAX_SECONDS = 2.0
MAX_PIXELS = 10_000
CPU_S = 2.0
"""No input may cost more of the CPU."""


@pytest.fixture(autouse=True, scope="module")
def _own_garbage() -> Iterator[None]:
    """Else a full collection of all the test run's heap comes to some decoder."""
    gc.freeze()
    yield
    gc.unfreeze()


fuzz = settings(max_examples=RUNS, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def sound(**kwargs: Any) -> bytes:
    out = io.BytesIO()
    samples = np.sin(np.arange(2_400) / 7) / 2
    soundfile.write(out, np.stack([samples] * kwargs.pop("channels", 1), axis=1), 8_000, **kwargs)
    return out.getvalue()


def picture(format: str, mode: str = "RGB", **kwargs: Any) -> bytes:
    out = io.BytesIO()
    shape = (23, 31, 3) if mode == "RGB" else (23, 31)
    pixels = (np.arange(np.prod(shape)) % 251).astype(np.uint8).reshape(shape)
    Image.fromarray(pixels).convert(mode).save(out, format, **kwargs)
    return out.getvalue()


SOUNDS = [
    sound(format="WAV", subtype="PCM_16"),
    sound(format="WAV", subtype="PCM_U8", channels=6),
    sound(format="WAV", subtype="FLOAT"),
    sound(format="WAV", subtype="IMA_ADPCM"),
    sound(format="WAV", subtype="MS_ADPCM"),
    sound(format="WAV", subtype="GSM610"),
    sound(format="WAV", subtype="ULAW"),
    sound(format="WAVEX", subtype="PCM_24", channels=2),
    sound(format="RF64", subtype="PCM_16"),
    sound(format="FLAC", subtype="PCM_16", channels=2),
    sound(format="OGG", subtype="VORBIS"),
    sound(format="OGG", subtype="OPUS"),
    sound(format="MP3"),
    b"ID3\x04\x00\x00\x00\x00\x00\x0a" + bytes(10) + sound(format="MP3"),
]
PICTURES = [
    picture("PNG"),
    picture("PNG", "P"),
    picture("PNG", "1"),
    picture("PNG", "RGBA", optimize=True),
    picture("JPEG"),
    picture("JPEG", "CMYK"),
    picture("JPEG", "L", progressive=True),
    picture("WEBP"),
    picture("WEBP", lossless=True),
    picture("GIF", "P"),
    picture("GIF", "P", save_all=True, append_images=[Image.new("P", (31, 23))] * 3),
]


@st.composite
def damaged(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """A file with a few bytes changed, numbers made extreme, parts cut, repeated or spliced from another file."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 6))):
        if not data:
            break
        at = draw(st.one_of(st.integers(0, min(80, len(data) - 1)), st.integers(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "extreme", "cut", "drop", "repeat", "splice", "random"])):
            case "flip":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "extreme":
                number = draw(st.sampled_from([0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 10**9, 2**31 - 1, 2**31, 2**32 - 1]))
                order = draw(st.sampled_from("<>"))
                data[at : at + 4] = struct.pack(f"{order}I", number)
            case "cut":
                del data[at:]
            case "drop":
                del data[at : at + draw(st.integers(1, 64))]
            case "repeat":
                piece = data[at : at + draw(st.integers(1, 200))]
                data[at:at] = piece * draw(st.integers(1, 50))
            case "splice":
                other = draw(st.sampled_from(originals))
                data[at:] = other[draw(st.integers(0, len(other))) :]
            case "random":
                data[at:at] = draw(st.binary(max_size=40))
    return bytes(data)


def decoded(decode: Callable[[], NDArray[Any]]) -> NDArray[Any] | None:
    """What came out; None for a proper 400. Anything else that is raised fails the test."""
    started = time.thread_time()
    answer: NDArray[Any] | InvalidRequestError
    try:
        answer = decode()
    except InvalidRequestError as error:
        answer = error
    assert time.thread_time() - started < CPU_S
    if isinstance(answer, InvalidRequestError):
        assert (answer.param, answer.status) == ("p", 400)
        return None
    return answer


def check_sound(data: bytes) -> None:
    samples = decoded(lambda: decode_audio(data, param="p", sample_rate=16_000, max_seconds=MAX_SECONDS))
    if samples is not None:
        assert samples.dtype == np.float32
        assert samples.ndim == 1
        assert 0 < len(samples) <= MAX_SECONDS * 16_000 + 1
        assert np.isfinite(samples).all()
        assert np.abs(samples).max() <= 1


def check_picture(data: bytes) -> None:
    pixels = decoded(lambda: decode_image(data, param="p", max_pixels=MAX_PIXELS))
    if pixels is not None:
        assert pixels.dtype == np.uint8
        assert pixels.shape[2:] == (3,)
        assert 0 < pixels.shape[0] * pixels.shape[1] <= MAX_PIXELS


@fuzz
@given(damaged(SOUNDS))
def test_damaged_sounds(data: bytes) -> None:
    check_sound(data)


@fuzz
@given(damaged(PICTURES))
@pytest.mark.filterwarnings("ignore")
def test_damaged_pictures(data: bytes) -> None:
    check_picture(data)


@fuzz
@given(st.binary(max_size=300), st.sampled_from([f[:n] for f in (*SOUNDS, *PICTURES) for n in (0, 4, 12, 44)]))
@pytest.mark.filterwarnings("ignore")
def test_headers_with_anything_behind_them(rest: bytes, head: bytes) -> None:
    check_sound(head + rest)
    check_picture(head + rest)


@fuzz
@given(st.one_of(st.text(max_size=200), st.from_regex(r"(data:[a-z/;,=]*)?[A-Za-z0-9+/=\n]*", fullmatch=True)))
def test_base64_of_any_text(text: str) -> None:
    found: list[bytes] = []
    with contextlib.suppress(InvalidRequestError):
        found.append(decode_base64(text, param="p", max_bytes=100))
    for decoded in found:
        assert 0 < len(decoded) <= 100
        plain = text.partition(",")[2] if text[:5].lower() == "data:" else text
        plain = plain.replace("\n", "").replace("\r", "")
        again = base64.b64encode(decoded).decode()
        assert len(again) == len(plain)
        assert again[:-4] == plain[:-4]  # the last group may hold bits that mean nothing


# --- bombs: small files that claim, or hold, far too much ---


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*c) for c in chunks) + chunk(b"IEND", b"")


def wav_header(frames: int, rate: int = 16_000, channels: int = 1, bits: int = 16) -> bytes:
    block = channels * bits // 8
    layout = struct.pack("<IHHIIHH", 16, 1, channels, rate, rate * block % 2**32, block % 2**16, bits)
    size = struct.pack("<I", min(frames * block, 2**32 - 1))
    return b"RIFF" + size + b"WAVEfmt " + layout + b"data" + size


ZEROS = zlib.compress(bytes(100_000_000), 9)  # 100 kB
SILENCE = io.BytesIO()
soundfile.write(SILENCE, np.zeros(5_000_000, np.int16), 16_000, format="FLAC")
LONG_FLAC = SILENCE.getvalue()
OGG_SILENCE = io.BytesIO()
soundfile.write(OGG_SILENCE, np.zeros(800_000, np.float32), 8_000, format="OGG", subtype="OPUS")
BOMBS = {
    "png of 100 megapixels": png(10_000, 10_000, (b"IDAT", ZEROS)),
    "png of 2**62 pixels": png(2**31 - 1, 2**31 - 1, (b"IDAT", ZEROS)),
    "small png with 100 MB behind it": png(10, 10, (b"IDAT", ZEROS)),
    "png with a text of 100 MB": png(10, 10, (b"zTXt", b"k\0\0" + ZEROS), (b"IDAT", zlib.compress(bytes(310)))),
    "png with a profile of 100 MB": png(10, 10, (b"iCCP", b"k\0\0" + ZEROS), (b"IDAT", zlib.compress(bytes(310)))),
    "gif larger than its screen": b"GIF89a\x01\x00\x01\x00\x80\x00\x00" + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\x02",
    "flac of five minutes' silence": LONG_FLAC,
    "opus of a hundred seconds": OGG_SILENCE.getvalue(),
    "wav of 10**9 samples, by its header": wav_header(10**9) + bytes(3200),
    "wav of 10**9 samples and none there": wav_header(10**9),
    "wav of 65535 channels": wav_header(10**9, channels=65_535) + bytes(200_000),
    "wav of 1024 channels": wav_header(10**9, channels=1024) + bytes(200_000),
    "wav of 2**32 - 1 Hz": wav_header(100, rate=2**32 - 1) + bytes(200),
    "wav of 1 Hz": wav_header(100, rate=1) + bytes(200),
    "gzip": b"\x1f\x8b\x08" + bytes(7) + ZEROS,
    "zip": b"PK\x03\x04" + bytes(26) + ZEROS,
    "id3 tag that claims 256 MB": b"ID3\x04\x00\x00\x7f\x7f\x7f\x7f" + bytes(2000),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.filterwarnings("ignore")
def test_bombs_cost_little(name: str) -> None:
    """Neither the decoder's time nor what it allocates follows the size that a file claims or unpacks to."""
    import resource

    check_sound(BOMBS[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check_sound(BOMBS[name])
    check_picture(BOMBS[name])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64_000


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", ["WAV", "WAVEX", "RF64"])
def test_samples_that_are_no_numbers(value: float, format: str) -> None:
    """Cast to integers they become silence or the loudest click there is."""
    samples = np.zeros(1000, np.float32)
    samples[700] = value
    out = io.BytesIO()
    soundfile.write(out, samples, 16_000, format=format, subtype="FLOAT")
    with pytest.raises(InvalidRequestError, match="NaN or infinite"):
        decode_audio(out.getvalue(), param="p", sample_rate=16_000, max_seconds=9)


@pytest.mark.parametrize("format", ["AIFF", "AU", "CAF", "VOC", "W64", "NIST", "PAF", "SVX", "MAT4", "MAT5", "IRCAM"])
def test_formats_that_nobody_sends_are_not_even_opened(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    soundfile.write(out, np.zeros(100, np.float32), 16_000, format=format, subtype="PCM_16")

    def opened(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("libsndfile was asked")

    monkeypatch.setattr(soundfile.SoundFile, "__init__", opened)
    with pytest.raises(InvalidRequestError, match="not decodable audio"):
        decode_audio(out.getvalue(), param="p", sample_rate=16_000, max_seconds=9)


def test_a_tag_is_no_way_around_that() -> None:
    """libsndfile skips an ID3 tag and looks again at what follows."""
    out = io.BytesIO()
    soundfile.write(out, np.zeros(3000, np.float32), 16_000, format="AIFF", subtype="PCM_16")
    with pytest.raises(InvalidRequestError, match="not decodable audio"):
        decode_audio(b"ID3\x04\0\0\0\0\0\0" + out.getvalue(), param="p", sample_rate=16_000, max_seconds=9)
