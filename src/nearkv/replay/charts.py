"""What a replay's figures look like, as plain shapes (pure): pages and pictures draw the same."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nearkv.replay.measuring import Figures

WIDTH = 760
"""Of every chart, in the unit of its shapes."""
DARK, FAINT = "#111111", "#dddddd"
_COLOURS = ("#2563eb", "#dc2626", "#16a34a", "#9333ea", "#ea580c", "#0891b2", "#4b5563", "#ca8a04")
_LEFT = 210
_BAR_HEIGHT = 18
_PLOT_HEIGHT = 260


@dataclass(frozen=True, slots=True)
class Plotted:
    """One variant: its figures, and the times to the first token at each hundredth, in ms."""

    label: str
    figures: Figures
    curve_ms: Sequence[float]


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text; ``y`` is where its letters stand, ``anchor`` which end is at ``x``."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    colour: str = DARK


@dataclass(frozen=True, slots=True)
class Bar:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True, slots=True)
class Line:
    """Points joined by straight lines."""

    points: Sequence[tuple[float, float]]
    colour: str
    width: float = 2.0


Shape = Words | Bar | Line


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing under its title; its shapes lie within ``WIDTH`` and ``height``."""

    title: str
    height: float
    shapes: Sequence[Shape]


def charts_of(plotted: Sequence[Plotted]) -> list[Chart]:
    """Return the charts of several variants, in the order to show them."""
    curves = _curves("Time to the first token, ms (share of requests within it)", plotted)
    return [
        _bars("Hit rate (share of prompt tokens)", plotted, lambda f: f.hit_ratio, "{:.3f}"),
        *([] if curves is None else [curves]),
        _bars("First token p50, ms", plotted, lambda f: f.first_token_ms.p50, "{:.0f}"),
        _bars("First token p90, ms", plotted, lambda f: f.first_token_ms.p90, "{:.0f}"),
        _bars("First token p99, ms", plotted, lambda f: f.first_token_ms.p99, "{:.0f}"),
        _bars("Per output token p90, ms", plotted, lambda f: f.per_token_ms.p90, "{:.1f}"),
        _bars(
            "Skew (largest over mean of computed tokens)",
            plotted,
            lambda f: f.skew_ratio,
            "{:.2f}",
        ),
        _bars("Refused requests", plotted, lambda f: sum(f.refused.values()), "{:.0f}"),
    ]


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _bars(
    title: str,
    plotted: Sequence[Plotted],
    value_of: Callable[[Figures], float | None],
    form: str,
) -> Chart:
    values = [value_of(each.figures) for each in plotted]
    most = max((value for value in values if value is not None), default=0.0) or 1.0
    room = WIDTH - _LEFT - 80
    shapes: list[Shape] = []
    for number, (each, value) in enumerate(zip(plotted, values, strict=True)):
        top = number * (_BAR_HEIGHT + 4)
        width = room * (value or 0.0) / most
        shown = "unknown" if value is None else form.format(value)
        shapes += [
            Words(_LEFT - 8, top + 13, each.label, "end"),
            Bar(_LEFT, top, width, _BAR_HEIGHT, _colour(number)),
            Words(_LEFT + width + 6, top + 13, shown),
        ]
    return Chart(title, len(plotted) * (_BAR_HEIGHT + 4), shapes)


def _curves(title: str, plotted: Sequence[Plotted]) -> Chart | None:
    """Return each variant's distribution over a logarithmic axis; ``None`` without any."""
    positive = [value for each in plotted for value in each.curve_ms if value > 0]
    if not positive:
        return None
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    high = max(high, low + 1)
    room = WIDTH - _LEFT - 20

    def across(value: float) -> float:
        return _LEFT + room * (math.log10(max(value, 10.0**low)) - low) / (high - low)

    shapes = list(_axis(across, range(low, high + 1)))
    for number, each in enumerate(plotted):
        last = max(1, len(each.curve_ms) - 1)
        points = [
            (across(value), _PLOT_HEIGHT * (1 - place / last))
            for place, value in enumerate(each.curve_ms)
        ]
        shapes += [
            Line(points, _colour(number)),
            Words(_LEFT - 8, number * 16 + 12, each.label, "end", _colour(number)),
        ]
    return Chart(title, max(_PLOT_HEIGHT + 24, len(plotted) * 16 + 8), shapes)


def _axis(across: Callable[[float], float], powers: Sequence[int]) -> Iterator[Shape]:
    for power in powers:
        at = across(10.0**power)
        yield Line([(at, 0.0), (at, _PLOT_HEIGHT)], FAINT, 1.0)
        yield Words(at, _PLOT_HEIGHT + 16, f"{10.0**power:g}", "middle")
