"""Figures as one HTML page with drawings in it (pure): no script, nothing to fetch.

Written here since a plotting library would be larger than all the rest of a replay.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from nearkv.replay.measuring import Figures

_COLOURS = ("#2563eb", "#dc2626", "#16a34a", "#9333ea", "#ea580c", "#0891b2", "#4b5563", "#ca8a04")
_WIDTH = 760
_LEFT = 210
_BAR_HEIGHT = 18
_PLOT_HEIGHT = 260
_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:60em;color:#111}"
    "svg{width:100%;height:auto;background:#fff}text{font:12px system-ui,sans-serif}"
    "h2{font-size:1.1em;margin:1.6em 0 .3em}"
)


@dataclass(frozen=True, slots=True)
class Plotted:
    """One variant: its figures, and the times to the first token at each hundredth, in ms."""

    label: str
    figures: Figures
    curve_ms: Sequence[float]


def page(title: str, plotted: Sequence[Plotted]) -> str:
    """Return the page."""
    parts = [
        _bars("Hit rate (share of prompt tokens)", plotted, lambda f: f.hit_ratio, "{:.3f}"),
        _curves("Time to the first token, ms (share of requests within it)", plotted),
        _bars("First token p50, ms", plotted, lambda f: f.first_token_ms.p50, "{:.0f}"),
        _bars("First token p90, ms", plotted, lambda f: f.first_token_ms.p90, "{:.0f}"),
        _bars("First token p99, ms", plotted, lambda f: f.first_token_ms.p99, "{:.0f}"),
        _bars("Per output token p90, ms", plotted, lambda f: f.per_token_ms.p90, "{:.1f}"),
        _bars("Skew (largest over mean of computed tokens)", plotted, _skew, "{:.2f}"),
        _bars("Refused requests", plotted, lambda f: sum(f.refused.values()), "{:.0f}"),
    ]
    head = f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{head}'
        f"<h1>{escape(title)}</h1>{''.join(parts)}</html>\n"
    )


def _skew(figures: Figures) -> float | None:
    return figures.skew_ratio


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _bars(
    title: str,
    plotted: Sequence[Plotted],
    value_of: Callable[[Figures], float | None],
    form: str,
) -> str:
    values = [value_of(each.figures) for each in plotted]
    most = max((value for value in values if value is not None), default=0.0) or 1.0
    room = _WIDTH - _LEFT - 80
    rows = []
    for number, (each, value) in enumerate(zip(plotted, values, strict=True)):
        top = number * (_BAR_HEIGHT + 4)
        width = room * (value or 0.0) / most
        shown = "unknown" if value is None else form.format(value)
        rows.append(
            f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{escape(each.label)}</text>'
            f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="{_BAR_HEIGHT}" '
            f'fill="{_colour(number)}"/>'
            f'<text x="{_LEFT + width + 6:.1f}" y="{top + 13}">{shown}</text>'
        )
    height = len(plotted) * (_BAR_HEIGHT + 4)
    return _drawing(title, "".join(rows), height)


def _curves(title: str, plotted: Sequence[Plotted]) -> str:
    """Draw each variant's distribution over a logarithmic axis."""
    positive = [value for each in plotted for value in each.curve_ms if value > 0]
    if not positive:
        return ""
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    high = max(high, low + 1)
    room = _WIDTH - _LEFT - 20

    def across(value: float) -> float:
        return _LEFT + room * (math.log10(max(value, 10.0**low)) - low) / (high - low)

    marks = [
        f'<line x1="{across(10.0**power):.1f}" x2="{across(10.0**power):.1f}" y1="0" '
        f'y2="{_PLOT_HEIGHT}" stroke="#ddd"/>'
        f'<text x="{across(10.0**power):.1f}" y="{_PLOT_HEIGHT + 16}" text-anchor="middle">'
        f"{10.0**power:g}</text>"
        for power in range(low, high + 1)
    ]
    for number, each in enumerate(plotted):
        last = max(1, len(each.curve_ms) - 1)
        points = " ".join(
            f"{across(value):.1f},{_PLOT_HEIGHT * (1 - place / last):.1f}"
            for place, value in enumerate(each.curve_ms)
        )
        marks.append(
            f'<polyline points="{points}" fill="none" stroke="{_colour(number)}" '
            'stroke-width="2"/>'
            f'<text x="{_LEFT - 8}" y="{number * 16 + 12}" text-anchor="end" '
            f'fill="{_colour(number)}">{escape(each.label)}</text>'
        )
    return _drawing(title, "".join(marks), max(_PLOT_HEIGHT + 24, len(plotted) * 16 + 8))


def _drawing(title: str, content: str, height: float) -> str:
    return (
        f'<h2>{escape(title)}</h2><svg viewBox="0 0 {_WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(title)}">{content}</svg>'
    )
