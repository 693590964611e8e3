import base64
import io
import re
import struct
import wave

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from omni_ray.audio import (
    FORMATS,
    StreamResampler,
    check_finite,
    decode_audio,
    decode_base64,
    decoding,
    encoders,
    find_format,
    open_encoder,
    pcm16,
)
from omni_ray.errors import InvalidRequestError, NonFiniteAudioError, PayloadTooLargeError

Samples = NDArray[np.float32]
MP3_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
OPUS_RATES = (8_000, 12_000, 16_000, 24_000, 48_000)
LAME_DELAY = 576 + 529  # of encoder and decoder, in samples; a file's Xing frame lets the reader cut it off
ZERO_FRAMES = base64.b64decode("UklGRiQAAABXQVZFZm10IBAAAAABAAEAgD4AAAB9AAACABAAZGF0YQAAAAA=")


def tone(seconds: float = 1.0, rate: int = 16_000, channels: int = 1, level: float = 0.5) -> Samples:
    mono = level * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
    return (mono if channels == 1 else np.stack([mono] * channels, axis=1)).astype(np.float32)


def file_of(samples: Samples, rate: int, container: str, subtype: str, **options: float | str) -> bytes:
    sink = io.BytesIO()
    soundfile.write(sink, samples, rate, format=container, subtype=subtype, **options)
    return sink.getvalue()


def wav_of(body: bytes, *, rate: int = 16_000, size: int | None = None, width: int = 2) -> bytes:
    size = len(body) if size is None else size
    layout = struct.pack("<IHHIIHH", 16, 1, 1, rate, (rate * width) & 0xFFFF_FFFF, width, 8 * width)
    return b"RIFF" + struct.pack("<I", size) + b"WAVEfmt " + layout + b"data" + struct.pack("<I", size) + body


def decode(data: bytes, rate: int = 16_000, max_seconds: float = 30) -> Samples:
    return decode_audio(data, param="input_audio", sample_rate=rate, max_seconds=max_seconds)


def encode(
    name: str, samples: Samples, *, rate: int = 24_000, streamed: bool = True, chunk: int = 1_000
) -> tuple[list[bytes], bytes]:
    """Returns what each write returned, and what finish returned."""
    encoder = open_encoder(
        name, sample_rate=rate, channels=samples.shape[1] if samples.ndim > 1 else 1, streamed=streamed
    )
    pieces = [encoder.write(samples[i : i + chunk]) for i in range(0, len(samples), chunk)]
    return pieces, encoder.finish()


def whole(name: str, samples: Samples, **options: int | bool) -> bytes:
    pieces, rest = encode(name, samples, **options)
    return b"".join(pieces) + rest


# --- base64 ---

CLIP = bytes(range(256)) * 3
CLIP_TEXT = base64.b64encode(CLIP).decode()


@pytest.mark.parametrize(
    "text",
    [
        CLIP_TEXT,
        base64.encodebytes(CLIP).decode(),
        CLIP_TEXT.replace("M", "M\r\n"),
        "data:audio/wav;base64," + CLIP_TEXT,
        "data:;base64," + CLIP_TEXT,
        "data:audio/ogg;codecs=opus;base64," + CLIP_TEXT,
        "DATA:audio/wav;BASE64," + base64.encodebytes(CLIP).decode(),
    ],
    ids=["raw", "lines", "crlf", "url", "url-without-type", "url-with-codecs", "url-upper-case"],
)
def test_c53_base64_forms_that_work(text: str) -> None:
    assert decode_base64(text, param="audio", max_bytes=len(CLIP)) == CLIP


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "not-valid-base64!!!",
        base64.urlsafe_b64encode(b"\xfb\xff\xfe" * 8).decode(),
        base64.b64encode(b"\xfb\xff\xfe" * 8).decode() + "AAAA=",
        base64.b64encode(CLIP[:100]).decode().rstrip("="),
        CLIP_TEXT[:41],
        "AA==AAAA",
        "AAAA-___AAAA",
        "AAAA AAAA",
        "AAAAé===",
        "data:audio/wav," + CLIP_TEXT,
        "data:audio/wav;base64," + base64.b64encode(CLIP[:100]).decode().rstrip("="),
        "data:audio/wav;base64",
        "data:audio/wav;base64,",
        "data:",
    ],
)
def test_c53_other_text_is_named_not_valid_base64(text: str) -> None:
    """C53: urlsafe text decoded to 0 bytes without an error, data: URLs gave "Incorrect padding"."""
    with pytest.raises(InvalidRequestError, match="'audio' is not valid base64") as caught:
        decode_base64(text, param="audio", max_bytes=1_000_000)
    assert caught.value.param == "audio"
    assert caught.value.status == 400


@pytest.mark.parametrize("size", [2**20 - 2, 2**20 - 1, 2**20])
@pytest.mark.parametrize("wrap", [base64.b64encode, base64.encodebytes])
def test_c55_size_limit_is_exact(size: int, wrap: object) -> None:
    text = wrap(bytes(size)).decode()  # type: ignore[operator]
    assert len(decode_base64(text, param="audio", max_bytes=size)) == size
    assert len(decode_base64("data:;base64," + text, param="audio", max_bytes=size)) == size
    with pytest.raises(PayloadTooLargeError):
        decode_base64(text, param="audio", max_bytes=size - 1)


def test_c55_too_large_is_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """C55: data: payloads had no cap; decoding first would already have cost the memory."""
    monkeypatch.setattr(decoding.base64, "b64decode", None)
    with pytest.raises(PayloadTooLargeError, match=r"'audio' exceeds the limit of 1\.5 MB") as caught:
        decode_base64("A" * (3 << 20), param="audio", max_bytes=3 << 19)
    assert caught.value.status == 413


def test_c55_long_text_is_decoded_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """C55: 50 MB in one call let no other thread run for 0.2 s. Only the last slice may end in padding."""
    data = np.random.default_rng(0).bytes(1000)
    text = base64.b64encode(data).decode()
    sizes: list[int] = []
    decode = base64.b64decode
    monkeypatch.setattr(decoding, "_BASE64_SLICE", 64)
    monkeypatch.setattr(
        decoding.base64, "b64decode", lambda s, validate: sizes.append(len(s)) or decode(s, validate=validate)
    )
    assert decode_base64(text, param="audio", max_bytes=1000) == data
    assert max(sizes) == 64
    for broken in (text[:62] + "==" + text[64:], text[:63] + "=" + text[64:], text[:-1] + "=A=="):
        with pytest.raises(InvalidRequestError):
            decode_base64(broken, param="audio", max_bytes=1000)


# --- decoding ---

CONTAINERS = [("WAV", "PCM_16"), ("WAV", "PCM_U8"), ("WAV", "PCM_24"), ("WAV", "PCM_32"), ("WAV", "FLOAT")]
CONTAINERS += [("WAVEX", "PCM_16"), ("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS")]
CONTAINERS += [("MP3", "MPEG_LAYER_III")]


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("container", "subtype"), CONTAINERS)
def test_c33_every_container_gives_the_same_second(container: str, subtype: str, channels: int) -> None:
    """C33: stereo and integer audio was taken for mono floats, so it came out twice as long."""
    decoded = decode(file_of(tone(channels=channels), 16_000, container, subtype))
    assert decoded.shape == (16_000,)
    assert decoded.dtype == np.float32
    steady, lossless = decoded[1_000:-1_000], "PCM" in subtype or subtype == "FLOAT"
    assert steady.std() == pytest.approx(0.5 / np.sqrt(2), rel=0.01)
    # what a lossy codec adds to the loudest sample is noise, not scale
    assert np.abs(steady).max() == pytest.approx(0.5, rel=0.02 if lossless else 0.05)
    if lossless:
        assert np.abs(decoded - tone()).max() < (0.01 if subtype == "PCM_U8" else 1e-4)


def test_c33_channels_are_averaged() -> None:
    stereo = np.stack([tone(), -0.5 * tone()], axis=1)
    assert np.abs(decode(file_of(stereo, 16_000, "WAV", "FLOAT")) - 0.25 * tone()).max() < 1e-6
    surround = np.stack([tone()] + [np.zeros(16_000, np.float32)] * 5, axis=1)
    assert np.abs(decode(file_of(surround, 16_000, "WAV", "FLOAT")) - tone() / 6).max() < 1e-6


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 24_000, 44_100, 48_000, 96_000, 192_000])
def test_c34_one_second_at_any_rate_gives_the_rate_in_samples(rate: int) -> None:
    decoded = decode(file_of(tone(rate=rate), rate, "WAV", "PCM_16"))
    assert len(decoded) == 16_000
    assert np.abs(decoded - tone())[200:-200].max() < 1e-3


@pytest.mark.parametrize(("container", "subtype"), [("WAV", "FLOAT"), ("FLAC", "PCM_16"), ("OGG", "OPUS")])
def test_long_clips_decode_as_in_one_read(container: str, subtype: str) -> None:
    data = file_of(tone(9.3, 24_000, 2), 24_000, container, subtype)
    at_once = soundfile.read(io.BytesIO(data), dtype="float32")[0].mean(axis=1)
    assert np.abs(decode(data, 24_000) - at_once).max() < 1e-6
    assert np.abs(decode(data) - soxr.resample(at_once, 24_000, 16_000, "HQ")).max() < 1e-6


def test_mp3_decodes_without_a_click_at_block_borders() -> None:
    """soundfile seeks after each block of a seekable file, mpg123 then starts anew: off by 0.5 at every border."""
    data = file_of(tone(9.3, 24_000), 24_000, "MP3", "MPEG_LAYER_III")
    decoded = decode(data, 24_000)
    assert len(decoded) == round(9.3 * 24_000)
    assert np.abs(decoded - soundfile.read(io.BytesIO(data), dtype="float32")[0]).max() < 1e-5


@pytest.mark.parametrize("tag", [b"", b"TAG" + bytes(125)], ids=["plain", "id3v1"])
def test_mp3_of_variable_rate_without_a_length_is_not_cut_short(tag: bytes) -> None:
    """libsndfile guesses the length from the first frames: 5 s of an ordinary piped VBR MP3 gave 0.5 s, no error."""
    sink = encoders._StreamSink()
    soundfile.write(sink, tone(5, 24_000), 24_000, format="MP3", subtype="MPEG_LAYER_III")
    data = sink.take() + tag
    assert len(soundfile.read(io.BytesIO(data))[0]) < 60_000
    decoded = decode(data, 24_000)
    assert 0 <= len(decoded) - 120_000 <= LAME_DELAY + 576
    assert np.abs(decoded[LAME_DELAY:][:120_000] - tone(5, 24_000))[300:-300].max() < 0.05


@pytest.mark.parametrize("size", [0xFFFF_FFFF, 0x7FFF_FFFF])
def test_c26_streaming_wav_header_reads_to_the_end(size: int) -> None:
    pcm, _ = pcm16(tone(0.15))
    assert decode(wav_of(pcm, size=size)).shape == (2_400,)


def flac_claiming(frames: int, samples: Samples) -> bytes:
    data = bytearray(file_of(samples, 16_000, "FLAC", "PCM_16"))
    data[21:26] = bytes([data[21] & 0xF0 | frames >> 32]) + struct.pack(">I", frames & 0xFFFF_FFFF)
    return bytes(data)


@pytest.mark.parametrize("frames", [0, 10**9, 2**36 - 1], ids=["unknown", "1e9", "max"])
def test_c55_header_that_lies_about_the_length_is_not_believed(frames: int) -> None:
    """C55: the frame count of the header is the client's word; soundfile.read allocates it (4 GB here) or fails."""
    assert np.abs(decode(flac_claiming(frames, tone(6.1))) - tone(6.1)).max() < 1e-4


def test_c54_hours_of_silence_in_a_small_flac_stop_at_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """C54: the file is small; decoded it would take 230 MB per hour. Decoding must stop at the cap, not after it."""
    bomb = file_of(np.zeros(16_000 * 3_600, np.int16), 16_000, "FLAC", "PCM_16")
    assert len(bomb) < 400_000
    read = decoding._ForwardFile.read
    blocks = []
    monkeypatch.setattr(decoding._ForwardFile, "read", lambda self, **kwargs: blocks.append(1) or read(self, **kwargs))
    with pytest.raises(InvalidRequestError, match="'input_audio' is longer than the limit of 30 seconds"):
        decode(bomb)
    assert len(blocks) == 30 * 16_000 // 65_536 + 1


def test_duration_limit_is_exact() -> None:
    assert len(decode(file_of(tone(2), 16_000, "WAV", "PCM_16"), max_seconds=2)) == 32_000
    with pytest.raises(InvalidRequestError, match=r"longer than the limit of 1\.5 seconds"):
        decode(file_of(tone(1.501), 16_000, "WAV", "PCM_16"), max_seconds=1.5)


VALID_WAV = wav_of(bytes(4_800))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello " * 200,
        VALID_WAV[:20],
        VALID_WAV[:36],
        file_of(tone(), 16_000, "FLAC", "PCM_16")[:60],
        file_of(tone(), 16_000, "OGG", "OPUS")[:60],
        file_of(tone(), 16_000, "MP3", "MPEG_LAYER_III")[:100],
        file_of(tone(9), 16_000, "FLAC", "PCM_16")[:20_000],
        b"\x89PNG\r\n\x1a\n" + bytes(2_000),
        b"\x1f\x8b\x08" + bytes(2_000),
        b"\x00\x00\x00\x18ftypmp42" + bytes(2_000),
        bytes(10_000),
        b"\xff" * 5_000,
        VALID_WAV[44:],
        VALID_WAV[:22] + b"\x00\x00" + VALID_WAV[24:],
    ],
    ids=[
        "empty",
        "text",
        "wav20",
        "wav36",
        "flac60",
        "ogg60",
        "mp3-100",
        "flac-cut",
        "png",
        "gzip",
        "mp4",
        "zeros",
        "ones",
        "pcm",
        "no-channels",
    ],
)
def test_c54_what_is_not_audio_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"'input_audio' is not decodable audio.* send wav, flac") as caught:
        decode(data)
    assert caught.value.param == "input_audio"


@pytest.mark.parametrize(
    "data",
    [ZERO_FRAMES, VALID_WAV[:44], file_of(tone()[:0], 16_000, "WAV", "FLOAT")],
    ids=["zero-frames", "header", "float"],  # the last one's bytes hold the time of day
)
def test_c05_clip_without_samples_is_refused(data: bytes) -> None:
    """C05: an empty buffer reached the engine and killed it; soundfile reads shape (0,) without an error."""
    with pytest.raises(InvalidRequestError, match="'input_audio' holds no audio samples"):
        decode(data)


def test_c05_clip_too_short_for_one_sample_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'input_audio' holds no audio samples"):
        decode(wav_of(b"\x01\x00", rate=192_000))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_c28_non_finite_input_is_refused(bad: float) -> None:
    samples = tone(2, channels=2)
    samples[31_000, 1] = bad
    with pytest.raises(InvalidRequestError, match="'input_audio' holds NaN or infinite samples"):
        decode(file_of(samples, 16_000, "WAV", "FLOAT"))


@pytest.mark.parametrize("level", [1.5, 3e38])
def test_overshoot_of_float_files_and_of_the_resampler_is_clipped(level: float) -> None:
    square = np.sign(tone(rate=48_000, channels=2)).astype(np.float32) * np.float32(level)
    decoded = decode(file_of(square, 48_000, "WAV", "FLOAT"))
    assert np.abs(decoded).max() == 1.0
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("rate", [1, 3_999, 384_001, 10_000_000, 2**31 - 1])
def test_absurd_sample_rates_are_refused(rate: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"'input_audio' has a sample rate of {rate} Hz; send 4000 to 384000"):
        decode(wav_of(bytes(4_800), rate=rate))


# --- samples ---


def test_c28_pcm16_is_exact_for_every_value() -> None:
    """C28: x * 32768 wraps 1.0 to -32768, and astype truncates, so values came back one off."""
    values = np.arange(-32_767, 32_768)
    pcm, clipped = pcm16((values / 32_767).astype(np.float32))
    assert np.array_equal(np.frombuffer(pcm, "<i2"), values)
    assert clipped == 0


def test_c28_overshoot_is_clipped_and_counted() -> None:
    """C28: 1.2 and -1.2 became -26216 and 26216, a loud click."""
    pcm, clipped = pcm16(np.array([1.2, -1.2, 1.0, -1.0, 0.0, 3e38], np.float32))
    assert struct.unpack("<6h", pcm) == (32_767, -32_767, 32_767, -32_767, 0, 32_767)
    assert clipped == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_c28_non_finite_output_fails_before_clamping(bad: float) -> None:
    """C28: NaN became silence."""
    samples = np.array([0.0, bad, 2.0], np.float32)
    with pytest.raises(NonFiniteAudioError, match="1 NaN or infinite samples of 3"):
        check_finite(samples)
    with pytest.raises(NonFiniteAudioError):
        pcm16(samples)
    check_finite(samples[:1])


def test_pcm16_interleaves_channels_whatever_the_memory_order() -> None:
    stereo = np.array([[1.0, -1.0], [0.5, 0.0], [0.0, 0.25]], np.float32)
    expected = struct.pack("<6h", 32_767, -32_767, 16_384, 0, 0, 8_192)
    assert pcm16(stereo) == (expected, 0)
    assert pcm16(np.asfortranarray(stereo)) == (expected, 0)
    assert pcm16(np.zeros((0, 2), np.float32)) == (b"", 0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-2, 2, width=32), max_size=50))
def test_pcm16_is_within_half_a_step(values: list[float]) -> None:
    pcm, clipped = pcm16(np.array(values, np.float32))
    steps = np.frombuffer(pcm, "<i2")
    assert np.abs(steps - np.clip(values, -1, 1) * 32_767).max(initial=0) < 0.51
    assert clipped == sum(abs(value) > 1 for value in values)


RATE_PAIRS = [(24_000, 8_000), (24_000, 48_000), (44_100, 16_000), (48_000, 24_000), (24_000, 22_050)]


@settings(max_examples=40, deadline=None)
@given(
    rates=st.sampled_from(RATE_PAIRS),
    channels=st.sampled_from([1, 2]),
    sizes=st.lists(st.integers(0, 3_000), max_size=8),
)
def test_c34_resampling_in_chunks_equals_resampling_at_once(
    rates: tuple[int, int], channels: int, sizes: list[int]
) -> None:
    """C34: a filter that is started anew for each chunk clicks at every border and loses samples."""
    shape = (sum(sizes), channels) if channels > 1 else (sum(sizes),)
    samples = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    at_once = StreamResampler(*rates, channels).push(samples, last=True)
    stream = StreamResampler(*rates, channels)
    borders = np.cumsum(sizes)
    parts = [stream.push(samples[end - size : end]) for size, end in zip(sizes, borders, strict=True)]
    chunked = np.concatenate([*parts, stream.push(samples[:0], last=True)])
    assert chunked.shape == at_once.shape
    assert chunked.dtype == np.float32
    assert len(at_once) == int(len(samples) * rates[1] / rates[0] + 0.5)
    assert np.abs(chunked - at_once).max(initial=0) < 1e-6


def test_resampler_passes_equal_rates_through() -> None:
    stream = StreamResampler(24_000, 24_000, 1)
    assert np.array_equal(stream.push(tone()), tone())
    assert stream.push(tone()[:0], last=True).shape == (0,)


# --- formats ---


def test_format_table() -> None:
    assert {f.name: (f.content_type, f.streamable) for f in FORMATS.values()} == {
        "pcm": ("audio/pcm", True),
        "wav": ("audio/wav", True),
        "flac": ("audio/flac", False),
        "mp3": ("audio/mpeg", True),
        "opus": ("audio/ogg", True),
    }
    assert all(find_format(name, streamed=False, param="x") is found for name, found in FORMATS.items())


@pytest.mark.parametrize(
    "name", ["aac", "ogg", "mpeg", "WAV", "Mp3", " wav", "", None, 3, True, ["wav"], {}, "x" * 10**5]
)
@pytest.mark.parametrize("streamed", [False, True])
def test_c48_unknown_format_lists_what_works(name: object, streamed: bool) -> None:
    works = "pcm, wav, mp3, opus" if streamed else "pcm, wav, flac, mp3, opus"
    with pytest.raises(InvalidRequestError, match=f"one of: {works}$") as caught:
        find_format(name, streamed=streamed, param="response_format")
    assert caught.value.param == "response_format"
    assert len(str(caught.value)) < 200


def test_c48_flac_is_refused_only_when_streamed() -> None:
    assert find_format("flac", streamed=False, param="x").name == "flac"
    for refuse in (
        lambda: find_format("flac", streamed=True, param="x"),
        lambda: open_encoder("flac", sample_rate=24_000, channels=1, streamed=True),
    ):
        with pytest.raises(InvalidRequestError, match=r"'flac' cannot be streamed; .*one of: pcm, wav, mp3, opus"):
            refuse()


@pytest.mark.parametrize(("name", "rates"), [("mp3", MP3_RATES), ("opus", OPUS_RATES)])
def test_rates_that_a_codec_lacks_are_refused_with_those_it_has(name: str, rates: tuple[int, ...]) -> None:
    usable = ", ".join(map(str, rates))
    with pytest.raises(InvalidRequestError, match=f"{name} cannot carry 18000 Hz; use a sample rate of {usable} Hz"):
        open_encoder(name, sample_rate=18_000, channels=1, streamed=False)
    with pytest.raises(InvalidRequestError, match=f"{name} carries at most 2 channels, not 3"):
        open_encoder(name, sample_rate=24_000, channels=3, streamed=False)


# --- encoders ---

MAGIC = {"wav": rb"RIFF....WAVEfmt ", "flac": rb"fLaC", "mp3": rb"\xff[\xe2-\xff]", "opus": rb"OggS.{24}OpusHead"}


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(
    ("name", "streamed"), [(f.name, streamed) for f in FORMATS.values() for streamed in {False, f.streamable}]
)
def test_c48_bytes_are_what_the_name_says_and_hold_all_samples(name: str, streamed: bool, channels: int) -> None:
    """C48: PCM bytes went out labelled mp3."""
    samples = tone(2.003, 24_000, channels)
    data = whole(name, samples, streamed=streamed)
    if name == "pcm":
        assert data == pcm16(samples)[0]
        return
    assert re.match(MAGIC[name], data, re.DOTALL)
    decoded, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    assert rate == 24_000
    assert decoded.ndim == channels
    if name in ("wav", "flac"):
        assert np.array_equal(
            np.round(decoded * 32_768), np.frombuffer(pcm16(samples)[0], "<i2").reshape(samples.shape)
        )
        return
    delay = LAME_DELAY if name == "mp3" and streamed else 0
    assert 0 <= len(decoded) - len(samples) - delay < (576 if delay else 1)
    assert np.abs(decoded[delay:][: len(samples)] - samples)[300:-300].max() < (0.05 if name == "mp3" else 0.1)


def test_c25_streamed_wav_has_one_header_of_unknown_size() -> None:
    """C25: each chunk was a WAV file of its own, players stopped after the first. C26: size 0 reads as empty."""
    samples = tone(1, 24_000, 2)
    pieces, rest = encode("wav", samples, chunk=997)
    body = b"".join(pieces) + rest
    assert body.count(b"RIFF") == 1
    assert len(pieces[0]) == 44 + 997 * 4
    assert all(len(piece) % 4 == 0 for piece in pieces)
    assert rest == b""
    assert struct.unpack("<4sI4s4sIHHIIHH4sI", body[:44]) == (
        b"RIFF", 0xFFFF_FFFF, b"WAVE", b"fmt ", 16, 1, 2, 24_000, 96_000, 4, 16, b"data", 0xFFFF_FFFF,
    )  # fmt: skip
    assert soundfile.read(io.BytesIO(body))[0].shape == (24_000, 2)
    with wave.open(io.BytesIO(body)) as reader:
        assert len(reader.readframes(10**6)) == 96_000


def test_c25_whole_wav_has_true_sizes() -> None:
    pieces, data = encode("wav", tone(1, 24_000), streamed=False)
    assert not any(pieces)
    assert struct.unpack("<I", data[4:8]) == (len(data) - 8,)
    assert struct.unpack("<I", data[40:44]) == (48_000,)
    with wave.open(io.BytesIO(data)) as reader:
        assert (reader.getnframes(), reader.getframerate(), reader.getnchannels()) == (24_000, 24_000, 1)


@pytest.mark.parametrize("streamed", [False, True])
def test_wav_without_a_single_write_is_a_valid_empty_file(streamed: bool) -> None:
    encoder = open_encoder("wav", sample_rate=24_000, channels=1, streamed=streamed)
    data = encoder.finish()
    assert len(data) == 44
    assert soundfile.info(io.BytesIO(data)).frames == 0


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("name", ["pcm", "wav"])
def test_c27_every_piece_is_whole_frames(name: str, channels: int) -> None:
    """C27: chunks cut inside a 16-bit sample made clients drop audio or go mute."""
    sizes = [4_063, 1, 0, 1_697, 3]
    encoder = open_encoder(name, sample_rate=24_000, channels=channels, streamed=True)
    pieces = [encoder.write(tone(1, 24_000, channels)[:size]) for size in sizes]
    header = [44 if name == "wav" else 0, 0, 0, 0, 0]
    assert [len(p) for p in pieces] == [h + 2 * channels * size for h, size in zip(header, sizes, strict=True)]
    assert encoder.finish() == b""


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("name", [f.name for f in FORMATS.values() if f.streamable])
def test_c30_streamed_pieces_leave_progressively(name: str, channels: int) -> None:
    """The longest audio that an encoder holds back: an Ogg page of opus lasts up to 1 s, an MP3 frame 24 ms."""
    samples = tone(8, 24_000, channels)
    pieces, rest = encode(name, samples, chunk=1_200)
    silent = max(len(gap) for gap in re.findall("0*", "".join("1" if piece else "0" for piece in pieces)))
    assert silent <= {"pcm": 0, "wav": 0, "mp3": 1, "opus": 40}[name]
    assert len(rest) <= {"pcm": 0, "wav": 0, "mp3": 3_000, "opus": 12_000}[name] * channels
    assert len(pieces[0]) > 0


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("name", "rate"), [("opus", r) for r in OPUS_RATES] + [("mp3", r) for r in MP3_RATES])
def test_c30_streams_are_continuous_and_never_patched(name: str, rate: int, channels: int) -> None:
    """C30: an MP3 made of glued files, or one whose first Xing frame counts only the first chunk, stops early.

    The sink records every write: only appends may carry a stream. LAME's empty first frame, which it patches into the
    Xing frame at the end, must be left out; all else must decode in full, at every rate.
    """
    samples = tone(1.5, rate, channels)
    encoder = open_encoder(name, sample_rate=rate, channels=channels, streamed=True)
    sink = encoder._sink  # type: ignore[attr-defined]
    patches, append = [], sink.write

    def record(data: bytes) -> int:
        if sink._position < sink._end:
            patches.append((sink._position, len(data)))
        return append(data)

    sink.write = record
    data = b"".join(encoder.write(samples[i : i + 700]) for i in range(0, len(samples), 700)) + encoder.finish()
    decoded = soundfile.read(io.BytesIO(data), dtype="float32")[0]
    ours = decode(data, rate)
    assert len(ours) == len(decoded)
    if name == "opus":
        assert patches == []
        assert len(decoded) == len(samples)
        return
    # one patch, of the frame that was never sent
    ((position, size),) = patches
    assert position == 0
    assert len(data) == sink._end - size
    assert b"Xing" not in data
    assert b"Info" not in data
    frame = 1_152 if rate >= 32_000 else 576
    assert 0 <= len(decoded) - len(samples) - LAME_DELAY < frame
    assert np.abs(decoded[LAME_DELAY:][: len(samples)] - samples)[300:-300].max() < 0.05


def test_c30_whole_mp3_has_its_true_length() -> None:
    for rate in MP3_RATES:
        pieces, data = encode("mp3", tone(1.5, rate), rate=rate, streamed=False)
        assert not any(pieces)
        assert b"Info" in data[:100]
        assert len(soundfile.read(io.BytesIO(data))[0]) == round(1.5 * rate)


def test_flac_that_was_never_patched_cannot_be_read_back() -> None:
    """Guards the decision that flac does not stream: libsndfile writes the length at the end, into the header."""
    sink = encoders._StreamSink()
    soundfile.write(sink, tone(), 16_000, format="FLAC", subtype="PCM_16")
    with pytest.raises(ValueError, match="array is too big"):
        soundfile.read(io.BytesIO(sink.take()))


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["pcm", "wav", "flac", "mp3"]),
    sizes=st.lists(st.integers(0, 4_000), min_size=1, max_size=6),
    streamed=st.booleans(),
)
def test_encoded_bytes_do_not_depend_on_the_chunking(name: str, sizes: list[int], streamed: bool) -> None:
    """Opus is left out: libsndfile picks a random Ogg serial number for each file."""
    streamed = streamed and FORMATS[name].streamable
    samples = tone(1, 24_000)[: sum(sizes)]
    encoder = open_encoder(name, sample_rate=24_000, channels=1, streamed=streamed)
    ends = np.cumsum(sizes)
    data = b"".join(encoder.write(samples[e - s : e]) for s, e in zip(sizes, ends, strict=True)) + encoder.finish()
    assert data == whole(name, samples, streamed=streamed, chunk=10**6)


@pytest.mark.parametrize("name", list(FORMATS))
def test_c28_encoders_clip_count_and_refuse_non_finite(name: str) -> None:
    encoder = open_encoder(name, sample_rate=24_000, channels=1, streamed=False)
    data = encoder.write(tone(1, 24_000, level=1.0))
    assert encoder.clipped == 0
    loud = tone(1, 24_000, level=1.0)
    loud[[100, 200, 300]] = 1.2, -1.2, 30
    data += encoder.write(loud)
    assert encoder.clipped == 3
    for bad in (np.nan, np.inf):
        with pytest.raises(NonFiniteAudioError):
            encoder.write(np.array([0.0, bad], np.float32))
    data += encoder.write(tone(1, 24_000)) + encoder.finish()
    if name != "pcm":
        assert len(soundfile.read(io.BytesIO(data))[0]) == 72_000
    else:
        assert len(data) == 144_000


@pytest.mark.parametrize("name", list(FORMATS))
def test_close_is_idempotent_and_ends_the_encoder(name: str) -> None:
    encoder = open_encoder(name, sample_rate=24_000, channels=1, streamed=FORMATS[name].streamable)
    encoder.write(tone(1, 24_000))
    encoder.close()
    encoder.close()
    if name not in ("pcm", "wav"):
        assert encoder._file.closed  # type: ignore[attr-defined]
    for call in (lambda: encoder.write(tone()), encoder.finish):
        with pytest.raises(ValueError, match="the encoder is closed"):
            call()
    finished = open_encoder(name, sample_rate=24_000, channels=1, streamed=False)
    finished.write(tone())
    finished.finish()
    finished.close()
    with pytest.raises(ValueError, match="the encoder is closed"):
        finished.finish()


@pytest.mark.parametrize("name", list(FORMATS))
def test_c33_samples_of_the_wrong_shape_are_refused(name: str) -> None:
    """C33: interleaved samples written as mono play at half speed, and nobody is told."""
    mono = open_encoder(name, sample_rate=24_000, channels=1, streamed=False)
    stereo = open_encoder(name, sample_rate=24_000, channels=2, streamed=False)
    for encoder, samples in (
        (mono, tone(channels=2)),
        (stereo, tone()),
        (stereo, tone(channels=3)),
        (mono, tone()[()][0]),
    ):
        with pytest.raises(ValueError, match="samples of shape"):
            encoder.write(np.asarray(samples))
    mono.write(tone())
    mono.write(tone()[:, None])
    mono.close()
    stereo.close()
