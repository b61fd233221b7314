"""Charts as one HTML page with drawings in it (pure): no script, nothing to fetch.

Written here since a plotting library would be larger than all the rest of a replay.
"""

from collections.abc import Sequence
from html import escape

from nearkv.replay.charts import WIDTH, Bar, Chart, Line, Shape

_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:60em;color:#111}"
    "svg{width:100%;height:auto;background:#fff}text{font:12px system-ui,sans-serif}"
    "h2{font-size:1.1em;margin:1.6em 0 .3em}"
)


def page(title: str, charts: Sequence[Chart]) -> str:
    """Return the page."""
    head = f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{head}'
        f"<h1>{escape(title)}</h1>{''.join(map(_drawing, charts))}</html>\n"
    )


def _drawing(chart: Chart) -> str:
    return (
        f'<h2>{escape(chart.title)}</h2><svg viewBox="0 0 {WIDTH} {chart.height:g}" role="img" '
        f'aria-label="{escape(chart.title)}">{"".join(map(_element, chart.shapes))}</svg>'
    )


def _element(shape: Shape) -> str:
    if isinstance(shape, Bar):
        return (
            f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" '
            f'height="{shape.height:.1f}" fill="{shape.colour}"/>'
        )
    if isinstance(shape, Line):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        return (
            f'<polyline points="{points}" fill="none" stroke="{shape.colour}" '
            f'stroke-width="{shape.width:g}"/>'
        )
    return (
        f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}" '
        f'fill="{shape.colour}">{escape(shape.text)}</text>'
    )
