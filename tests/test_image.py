"""Decoding pictures: formats, rotation, first frames, and files that lie or are damaged."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from omni_ray.errors import InvalidRequestError
from omni_ray.image import decode_image

Image = pytest.importorskip("PIL.Image")
RED, GREEN = (255, 0, 0), (0, 255, 0)


def encoded(image: Any, format: str, **kwargs: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **kwargs)
    return out.getvalue()


def decode(data: bytes, max_pixels: int = 10_000) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return decode_image(data, param="p", max_pixels=max_pixels)


@pytest.mark.parametrize(("format", "exact"), [("PNG", True), ("WEBP", True), ("GIF", False), ("JPEG", False)])
def test_formats(format: str, exact: bool):
    pixels = np.zeros((6, 10, 3), np.uint8)
    pixels[:, :5] = RED
    pixels[:, 5:] = GREEN
    found = decode(encoded(Image.fromarray(pixels), format, **({"lossless": True} if format == "WEBP" else {})))
    assert (found.shape, found.dtype) == ((6, 10, 3), np.uint8)
    if exact:
        assert np.array_equal(found, pixels)
    else:
        assert np.abs(found[3, [1, 8]].astype(int) - np.array([RED, GREEN])).max() < 60


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK"])
def test_every_mode_becomes_rgb(mode: str):
    format = "JPEG" if mode == "CMYK" else "PNG"
    assert decode(encoded(Image.new(mode, (4, 3)), format)).shape == (3, 4, 3)


def test_a_moving_picture_gives_its_first_frame():
    frames = [Image.new("RGB", (4, 4), color) for color in (RED, GREEN)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(data)[0, 0].tolist() == list(RED)


def test_the_cameras_rotation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded(Image.new("RGB", (8, 4)), "JPEG", exif=exif.tobytes())).shape == (8, 4, 3)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds nothing."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", zlib.compress(b""))


@pytest.mark.parametrize(("width", "height"), [(101, 100), (100_000, 1), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_c55_too_many_pixels_are_refused_by_the_header(width: int, height: int):
    with pytest.raises(InvalidRequestError, match="megapixels") as raised:
        decode(png_header(width, height))
    assert raised.value.param == "p"


def test_c54_what_is_no_picture_is_refused():
    whole = encoded(Image.effect_noise((40, 40), 50), "JPEG")
    tiff = encoded(Image.new("RGB", (4, 4)), "TIFF")
    for data in (b"", b"RIFF\x00\x00\x00\x00WAVE", b"<svg/>", whole[:-200], whole[:30], tiff, png_header(4, 4)):
        with pytest.raises(InvalidRequestError, match="not a decodable picture"):
            decode(data)
