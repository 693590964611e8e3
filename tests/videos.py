"""Videos made on the spot, for tests: each frame is one grey that tells its number."""

from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import pytest
from numpy.typing import NDArray

av = pytest.importorskip("av")

GREY_STEP = 4
RATE = 48_000


def grey(frame: int) -> int:
    return 16 + frame * GREY_STEP % 216


def made_video(
    *,
    frames: int = 60,
    fps: int = 30,
    width: int = 64,
    height: int = 48,
    container: str = "mp4",
    codec: str = "libx264",
    sound: NDArray[np.float32] | None = None,
    pictures: NDArray[np.uint8] | None = None,
    options: dict[str, str] | None = None,
) -> bytes:
    """An encoded video; ``sound`` is mono at ``RATE``, ``pictures`` uint8 [frames, height, width, 3]."""
    with NamedTemporaryFile() as out:  # not a buffer: an index in front is written by opening the file again
        _write(out.name, frames, fps, width, height, container, codec, sound, pictures, options or {})
        return Path(out.name).read_bytes()


def _write(
    path: str,
    frames: int,
    fps: int,
    width: int,
    height: int,
    container: str,
    codec: str,
    sound: NDArray[np.float32] | None,
    pictures: NDArray[np.uint8] | None,
    options: dict[str, str],
) -> None:
    with av.open(path, "w", format=container, options=options) as file:
        if pictures is not None:
            frames, height, width, _ = pictures.shape
        stream = file.add_stream(codec, rate=fps) if frames else None
        track = None
        if sound is not None:
            track = file.add_stream("aac" if container in ("mp4", "mov") else "libopus", rate=RATE)
            track.layout = "stereo"
        if stream is not None:
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.bit_rate = 4_000_000
            stream.options = {"deadline": "realtime"} if codec.startswith("libvpx") else {}
            for number in range(frames):
                shown = np.full((height, width, 3), grey(number), np.uint8) if pictures is None else pictures[number]
                file.mux(stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")))
            file.mux(stream.encode(None))
        if track is not None and sound is not None:
            for at in range(0, len(sound), 1024):
                block = av.AudioFrame.from_ndarray(
                    np.stack([sound[at : at + 1024]] * 2), format="fltp", layout="stereo"
                )
                block.rate, block.pts = RATE, at
                file.mux(track.encode(block))
            file.mux(track.encode(None))


def hum(seconds: float, frequency: float = 440.0) -> NDArray[np.float32]:
    """A sine."""
    return (0.3 * np.sin(2 * np.pi * frequency * np.arange(int(seconds * RATE)) / RATE)).astype(np.float32)
