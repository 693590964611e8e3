"""Decoding and encoding pictures (Pillow); the only place that touches their formats. Knows no requests or stages."""

import io
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from omni_ray.errors import InvalidRequestError

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""What OpenAI's API takes. Pillow knows many more formats, among them some that run other programs."""

ImageFormat = Literal["png", "jpeg", "webp"]
"""Of pictures that are sent."""


def decode_image(data: bytes, *, param: str, max_pixels: int) -> NDArray[np.uint8]:
    """Decodes one picture. The content decides the format; whatever the client declared is ignored (C54).

    As transformers' ``load_image``: the camera's rotation is applied, transparency is dropped. Of a moving picture the
    first frame is taken. CPU work, so the caller keeps it off the event loop.

    Args:
        data: png, jpeg, webp or gif.
        param: the request field, for the errors.
        max_pixels: width times height; checked by the header, before anything is decoded.

    Returns:
        uint8 RGB [height, width, 3].

    Raises:
        InvalidRequestError: not a picture, damaged, or of more than ``max_pixels``.
    """
    from PIL import Image, ImageOps

    too_large = InvalidRequestError(
        f"'{param}' has more than the {max_pixels / 1e6:.4g} megapixels allowed; send a smaller picture", param
    )
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > max_pixels:
                raise too_large
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except InvalidRequestError:
        raise
    except Image.DecompressionBombError as error:
        raise too_large from error
    except Exception as error:  # a damaged file may lead a decoder to raise anything
        raise InvalidRequestError(
            f"'{param}' is not a decodable picture, or is damaged; send png, jpeg, webp or gif", param
        ) from error


def encode_image(pixels: NDArray[np.uint8], format: ImageFormat, *, quality: int = 100) -> bytes:
    """A file of one picture. CPU work, so the caller keeps it off the event loop.

    Args:
        pixels: uint8 RGB [height, width, 3].
        format: of the file. png keeps every pixel, the others lose some.
        quality: of jpeg and webp, 0 to 100.
    """
    from PIL import Image

    file = io.BytesIO()
    lossy = {} if format == "png" else {"quality": quality}
    Image.fromarray(pixels).save(file, format=format.upper(), **lossy)
    return file.getvalue()
