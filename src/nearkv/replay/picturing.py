"""Charts as one PNG, drawn by Pillow (extra ``plots``); import it only where one is wanted."""

import io
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from nearkv.replay.charts import DARK, WIDTH, Bar, Chart, Line, Shape

_MARGIN = 24
_TITLE_SIZE, _HEADING_SIZE, _TEXT_SIZE = 22, 16, 12
_TITLE_HEIGHT, _HEADING_HEIGHT = 44, 44
_FINE, _COARSE = 2, 1
_MOST_FINE_HEIGHT = 8_000
"""Pixels for each unit: many variants make a long picture, which need not be a large one, too."""
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def picture(title: str, charts: Sequence[Chart]) -> bytes:
    """Return the PNG."""
    height = 2 * _MARGIN + _TITLE_HEIGHT + sum(_HEADING_HEIGHT + chart.height for chart in charts)
    scale = _FINE if height <= _MOST_FINE_HEIGHT else _COARSE
    size = (scale * (WIDTH + 2 * _MARGIN), round(scale * height))
    image = Image.new("RGB", size, "white")
    drawing = _Drawing(image, scale)
    drawing.words(0.0, _MARGIN + _TITLE_SIZE, title, size=_TITLE_SIZE)
    top = float(_MARGIN + _TITLE_HEIGHT)
    for chart in charts:
        top += _HEADING_HEIGHT
        drawing.words(0.0, top - 12, chart.title, size=_HEADING_SIZE)
        for shape in chart.shapes:
            drawing.shape(shape, top)
        top += chart.height
    written = io.BytesIO()
    image.save(written, format="PNG", optimize=True)
    return written.getvalue()


class _Drawing:
    """An image, drawn on in the charts' unit."""

    def __init__(self, image: Image.Image, scale: int) -> None:
        self._draw = ImageDraw.Draw(image)
        self._scale = scale
        sizes = (_TITLE_SIZE, _HEADING_SIZE, _TEXT_SIZE)
        self._fonts = {size: ImageFont.load_default(size * scale) for size in sizes}

    def words(
        self, x: float, y: float, text: str, *, size: int, anchor: str = "ls", colour: str = DARK
    ) -> None:
        place = self._at(x, y)
        self._draw.text(place, text, fill=colour, font=self._fonts[size], anchor=anchor)

    def shape(self, shape: Shape, top: float) -> None:
        if isinstance(shape, Bar):
            if shape.width > 0:  # Pillow draws a line for none
                corner = self._at(shape.x + shape.width, top + shape.y + shape.height)
                self._draw.rectangle((self._at(shape.x, top + shape.y), corner), fill=shape.colour)
        elif isinstance(shape, Line):
            points = [self._at(x, top + y) for x, y in shape.points]
            width = round(shape.width * self._scale)
            self._draw.line(points, fill=shape.colour, width=width, joint="curve")
        else:
            self.words(
                shape.x,
                top + shape.y,
                shape.text,
                size=_TEXT_SIZE,
                anchor=_ANCHORS[shape.anchor],
                colour=shape.colour,
            )

    def _at(self, x: float, y: float) -> tuple[float, float]:
        return self._scale * (_MARGIN + x), self._scale * y
