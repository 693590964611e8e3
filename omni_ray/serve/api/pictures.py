"""The pictures of one answer: rows in order -> whole pictures -> files that may be sent."""

from dataclasses import dataclass

import numpy as np

from omni_ray.engine.types import ImageChunk
from omni_ray.errors import StageFailedError, TruncatedError
from omni_ray.image import ImageFormat, encode_image
from omni_ray.serve.api.threads import in_thread


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded picture. ``preview``: it is not finished."""

    data: bytes
    width: int
    height: int
    preview: bool


class Pictures:
    """Puts together and encodes what one request paints.

    Args:
        format, quality: see ``encode_image``.
        max_bytes: most bytes of all pictures, previews included.
    """

    def __init__(self, format: ImageFormat, quality: int, max_bytes: int) -> None:
        self._format = format
        self._quality = quality
        self._left_bytes = max_bytes
        self._position = 0
        self._rows: list[ImageChunk] = []  # of the picture that is not complete

    async def add(self, chunk: ImageChunk) -> Picture | None:
        """The picture that ``chunk`` completes, if it does.

        Raises:
            StageFailedError: it does not follow the last one.
            TruncatedError: the pictures have more than ``max_bytes``.
        """
        first = self._rows[0] if self._rows else chunk
        row = sum(len(known.pixels) for known in self._rows)
        if (chunk.position, chunk.row, chunk.preview) != (self._position, row, first.preview):
            raise StageFailedError(f"rows of position {chunk.position} came where {self._position} was due")
        self._position += len(chunk.pixels)
        self._rows.append(chunk)
        if not chunk.ends_picture:
            return None
        rows, self._rows = self._rows, []
        pixels = np.concatenate([known.pixels for known in rows])
        data = await in_thread(encode_image, pixels, self._format, quality=self._quality)
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise TruncatedError("the pictures have more bytes than one answer may have here (ingress.max_answer_mb)")
        return Picture(data, pixels.shape[1], pixels.shape[0], chunk.preview)
