"""One request's pictures on a thread: painted one after the other, told step by step, stopped between two steps."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.types import Finish, ImageChunk, ImagePrompt, Output, Request, StepChunk, Usage
from omni_ray.errors import StageFailedError

SEEDS = 2**63
"""Seeds are below it; the seed of a later picture begins again at 0."""

Pixels = NDArray[np.uint8]
Preview = Callable[[], Pixels | None]
"""What a picture looks like between two steps, uint8 RGB [height, width, 3]; None where a model cannot say."""
Stepped = Callable[[int, int, Preview], None]
"""Called with the step's number (from 1), the number of steps, and how to look at the picture now."""


@dataclass(frozen=True, slots=True)
class Painted:
    """A picture, uint8 RGB ``pixels`` [height, width, 3].

    ``prompt_tokens`` are those of its text, ``image_tokens`` places of its latent.
    """

    pixels: Pixels
    prompt_tokens: int
    image_tokens: int


class Paint(Protocol):
    """``DiffusionModel.paint``."""

    def __call__(self, prompt: ImagePrompt, seed: int, stepped: Stepped) -> Painted: ...  # noqa: D102


class _Cancelled(Exception):
    """Leaves ``paint`` between two steps."""


class DiffusionRun:
    """Paints ``prompt.count`` pictures.

    Attributes:
        ended: done once the thread has nothing left to do.
    """

    def __init__(self, request: Request, prompt: ImagePrompt, paint: Paint) -> None:
        self._seed = request.seed
        self._prompt = prompt
        self._paint = paint
        self._cancelled = threading.Event()
        self._steps = self._rows = 0
        self._previewed = 0  # of this picture
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        # not the interpreter's to wait for: a step that never returns must not keep a dying replica alive
        threading.Thread(target=self._work, name=f"diffusion-{request.request_id}", daemon=True).start()

    async def outputs(self) -> AsyncGenerator[Output]:
        """Steps, previews, pictures and the finish; raises what ``paint`` raised."""
        while not isinstance(item := await self._arrived.get(), Finish):
            if isinstance(item, Exception):
                raise item
            yield item
        yield item

    def cancel(self) -> None:
        """No further step begins. May be called twice."""
        self._cancelled.set()

    def _work(self) -> None:
        try:
            self._paint_all()
        except Exception as error:
            self._tell(error)
        except BaseException as error:  # raised on the event loop, upstream's `sys.exit` would end all requests
            self._tell(StageFailedError(f"the model raised {type(error).__name__}"))
        self._call(self._end)

    def _paint_all(self) -> None:
        made = []
        for picture in range(self._prompt.count):
            self._previewed = 0
            painted = self._paint(self._prompt, (self._seed + picture) % SEEDS, self._stepped)
            self._show(painted.pixels, preview=False)
            made.append(painted.image_tokens)
        self._tell(Finish(usage=Usage(prompt_tokens=painted.prompt_tokens, image_tokens=sum(made))))

    def _stepped(self, step: int, steps: int, preview: Preview) -> None:
        if self._cancelled.is_set():
            raise _Cancelled
        self._tell(StepChunk(self._steps, step, steps))
        self._steps += 1
        due = step * (self._prompt.previews + 1) // steps
        if self._previewed < due <= self._prompt.previews:
            self._previewed = due
            if (pixels := preview()) is not None:
                self._show(pixels, preview=True)

    def _show(self, pixels: Pixels, *, preview: bool) -> None:
        self._tell(ImageChunk(self._rows, pixels, 0, len(pixels), preview))
        self._rows += len(pixels)

    def _tell(self, item: Output | Exception) -> None:
        self._call(lambda: self._arrived.put_nowait(item))

    def _call(self, function: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
