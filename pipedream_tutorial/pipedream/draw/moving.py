"""Moving pictures: frames from matplotlib, written as a GIF."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from pipedream.draw.page import DPI, WIDTH
from pipedream.simulate.simulator import Timeline

SCALE = 1.25  # pixels of a frame for one of the page that shows it
COLOURS = 32
LAST_MS = 4000
"""For how long the last frame stays."""

Frame = tuple[Image.Image, int]
"""A picture, and for how many ms it is shown."""


class Animation(NamedTuple):
    """What moves, as digests see it and as it is drawn."""

    texts: tuple[str, ...]
    timelines: tuple[Timeline, ...]
    frames: Callable[[], Iterator[Frame]]


def as_image(figure: Figure) -> Image.Image:
    """The page in pixels, at the size of a frame."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())
    width = int(WIDTH * DPI * SCALE / 2)
    return image.convert("RGB").resize((width, round(image.height * width / image.width)))


def digest(animation: Animation) -> str:
    """Of every text, and of every event's start and end."""
    parts = list(animation.texts)
    for timeline in animation.timelines:
        parts += [f"{e.rank} {e.item} {e.start} {e.end}" for e in timeline.all_events()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _palette(images: Sequence[Image.Image]) -> Image.Image:
    """Colours of the first, the middle and the last frame."""
    width, height = images[0].size
    sheet = Image.new("RGB", (width, 3 * height))
    for row, image in enumerate((images[0], images[len(images) // 2], images[-1])):
        sheet.paste(image, (0, row * height))
    return sheet.quantize(COLOURS)


def draw_animation(animation: Animation, path: Path) -> None:
    """Write the GIF; what it was drawn from is in its comment as a digest."""
    images, durations = zip(*animation.frames(), strict=True)
    palette = _palette(images)
    first, *others = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    first.save(
        path,
        save_all=True,
        append_images=others,
        duration=list(durations),
        loop=0,
        comment=digest(animation).encode(),
    )
