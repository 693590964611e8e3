"""Decoding videos: which frames, rotation, sound; and files that lie, are damaged, or ask for too much."""

import contextlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from omni_ray.config.pipeline import VideoSampling
from omni_ray.errors import InvalidRequestError
from omni_ray.video import decode_sound, decode_video
from tests.videos import grey, hum, made_video

TWO_A_SECOND = VideoSampling()


def decode(data: bytes, max_seconds: float = 10, max_pixels: int = 1_000_000) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return decode_video(
        data, param="p", choose=TWO_A_SECOND.indices, max_seconds=max_seconds, max_pixels=max_pixels
    )  # fmt: skip


def refusal(data: bytes, **limits: Any) -> str:
    with pytest.raises(InvalidRequestError) as raised:
        decode(data, **limits)
    assert raised.value.param == "p"
    return raised.value.message


@pytest.mark.parametrize(
    ("container", "codec"),
    [("mp4", "libx264"), ("mov", "mpeg4"), ("webm", "libvpx"), ("webm", "libvpx-vp9"), ("matroska", "libx264")],
)
def test_the_frames_are_those_chosen(container: str, codec: str) -> None:
    """Also where frames are stored in another order than shown (B frames), and where the header counts none (webm)."""
    frames = decode(made_video(container=container, codec=codec, frames=50, fps=25))
    assert (frames.shape, frames.dtype) == ((4, 48, 64, 3), np.uint8)
    assert np.abs(frames.mean((1, 2, 3)) - [grey(n) for n in (0, 12, 25, 37)]).max() < 2


@pytest.mark.parametrize(
    ("count", "rate", "taken"),
    [
        (60, 30, [0, 15, 30, 45]),
        (10, 30, [0, 2, 5, 7]),
        (3, 30, [0, 1]),
        (1, 30, [0]),
        (2000, 1, [int(n * 2000 / 768) for n in range(768)]),
    ],
)
def test_frames_taken(count: int, rate: float, taken: Sequence[int]) -> None:
    """Two a second, at least four, at most 768, in pairs; a video of fewer is taken whole."""
    assert TWO_A_SECOND.indices(count, rate) == taken


def test_one_frame_is_a_video() -> None:
    assert decode(made_video(frames=1)).shape == (1, 48, 64, 3)


def test_the_cameras_rotation_is_applied() -> None:
    """Telephones store upright films lying down, with a matrix in the track header."""
    pictures = np.full((8, 48, 64, 3), 30, np.uint8)
    pictures[:, :, :32] = 220
    data = bytearray(made_video(pictures=pictures))
    at = data.index(b"tkhd") + 4 + 40  # version 0: 40 bytes before the matrix
    assert data[at : at + 4] == struct.pack(">i", 1 << 16)
    quarter = (0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)  # 90 degrees clockwise
    data[at : at + 36] = struct.pack(">9i", *quarter)
    frames = decode(bytes(data))
    assert frames.shape[1:] == (64, 48, 3)
    assert frames[:, :28].min() > 180, "what was left is now at the top"
    assert frames[:, 36:].max() < 80


@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_the_sound_is_heard(container: str) -> None:
    data = made_video(container=container, codec="libx264" if container == "mp4" else "libvpx", sound=hum(2))
    samples = decode_sound(data, param="p", sample_rate=16_000, max_seconds=10)
    assert samples.dtype == np.float32
    assert abs(len(samples) - 32_000) < 1600
    spectrum = np.abs(np.fft.rfft(samples[8000:24_000]))
    assert abs(np.argmax(spectrum) - 440) <= 1
    assert abs(np.sqrt(np.mean(samples[8000:24_000] ** 2)) - 0.3 / np.sqrt(2)) < 0.02
    with pytest.raises(InvalidRequestError, match="longer than the limit of 1 seconds"):
        decode_sound(data, param="p", sample_rate=16_000, max_seconds=1)


def test_a_silent_video_cannot_be_heard() -> None:
    with pytest.raises(InvalidRequestError, match="has no sound, but use_audio_in_video asks for it"):
        decode_sound(made_video(frames=4), param="p", sample_rate=16_000, max_seconds=10)


def test_what_is_no_video_is_refused() -> None:
    """Playlists name other files and addresses: no demuxer that follows them ever runs."""
    playlists = (
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"RIFF\x24\x00\x00\x00WAVEfmt ",
        b"\x89PNG\r\n\x1a\n",
        b"",
        b"plain text",
        b"\x00\x00\x00\x18ftypisom" + bytes(400),
        b"\x1a\x45\xdf\xa3" + bytes(400),
    )
    for data in playlists:
        assert "not a decodable video" in refusal(data)
    assert "no video stream" in refusal(made_video(frames=0, sound=hum(1)))


@pytest.mark.parametrize("container", ["mp4", "webm"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.7])
def test_a_video_that_was_cut_is_refused(container: str, part: float) -> None:
    """Whether its index lies in front or behind, or it has none."""
    noise = np.random.default_rng(0).integers(0, 255, (60, 48, 64, 3), np.uint8)
    for options in ({"movflags": "faststart"}, {}) if container == "mp4" else ({},):
        codec = "libx264" if container == "mp4" else "libvpx"
        whole = made_video(pictures=noise, container=container, codec=codec, options=options)
        said = refusal(whole[: int(len(whole) * part)])
        assert "cut short" in said or "not a decodable video" in said


def test_limits() -> None:
    data = made_video(frames=60)
    assert "longer than the limit of 1 seconds" in refusal(data, max_seconds=1)
    assert "more than the 0.012 megapixels" in refusal(data, max_pixels=12_000)
    assert decode(data, max_pixels=4 * 48 * 64).shape[0] == 4
    assert "more than 120 frames a second" in refusal(made_video(frames=400, fps=400), max_seconds=3)
    assert "codec mjpeg is not read here" in refusal(
        made_video(frames=4, container="matroska", codec="libx264").replace(
            b"V_MPEG4/ISO/AVC", b"V_MJPEG\x00\x00\x00\x00\x00\x00\x00\x00"
        )
    )


def test_a_bomb_is_refused_by_its_header() -> None:
    """A few kB that would become 15 MB a frame, of which a decoder keeps many."""
    said = refusal(made_video(frames=1, width=4352, height=2304), max_pixels=10**12)
    assert "4352 x 2304 are too large" in said


def test_a_header_that_lies_about_its_size_is_refused() -> None:
    """The header says 64 x 48, the stream holds 640 x 480 (the limit is for the former)."""
    data = bytearray(made_video(frames=8, width=640, height=480))
    at = data.index(b"avc1", data.index(b"stsd")) + 4 + 24
    assert struct.unpack(">2H", data[at : at + 4]) == (640, 480)
    data[at : at + 4] = struct.pack(">2H", 64, 48)
    assert "megapixels allowed" in refusal(bytes(data), max_pixels=100_000)


def test_frames_without_times_are_refused() -> None:
    data = bytearray(made_video(frames=8))
    at = data.index(b"stts") + 4 + 4
    entries = struct.unpack(">I", data[at : at + 4])[0]
    for entry in range(entries):
        data[at + 8 + 8 * entry : at + 12 + 8 * entry] = struct.pack(">I", 0)
    while (found := data.find(b"ctts")) >= 0:
        data[found : found + 4] = b"free"
    said = refusal(bytes(data))
    assert "no frame rate" in said or "cut short" in said or "no frames" in said


def test_damaged_files_are_refused_or_decoded_and_nothing_else() -> None:
    """Random bytes changed: 80 files, whatever ffmpeg makes of them."""
    random = np.random.default_rng(1)
    for container, codec in (("mp4", "libx264"), ("webm", "libvpx")):
        whole = np.frombuffer(made_video(frames=6, container=container, codec=codec, sound=hum(0.2)), np.uint8)
        for _ in range(40):
            data = whole.copy()
            data[random.integers(8, len(data), 6)] = random.integers(0, 256, 6)
            for read in (
                lambda bad: decode(bad),
                lambda bad: decode_sound(bad, param="p", sample_rate=16_000, max_seconds=10),
            ):
                with contextlib.suppress(InvalidRequestError):
                    read(data.tobytes())


def test_without_pyav_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ray.video.find_spec", lambda name: None)
    assert "install omni-ray[video]" in refusal(b"")
