"""``nearkv replay``: a trace over a simulated fleet, with the router's own code."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from nearkv.cli.plan import PlanError, parse_link
from nearkv.replay.asking import ReplayQuestion, Row, run_all
from nearkv.replay.charts import Chart, Plotted, charts_of
from nearkv.replay.errors import ReplayError
from nearkv.replay.fleet_feed import LinkProfile
from nearkv.replay.measuring import Percentiles
from nearkv.replay.plotting import page

Drawer = Callable[[str, Sequence[Chart]], bytes]

UNKNOWN = "-"
# As in status: long lines are left to the terminal.
_TABLE_WIDTH = 10_000
_COLUMNS = (
    *("POLICY", "HIT RATE", "TTFT MS P50", "P90", "P99"),
    *("TPOT MS P50", "P90", "P99", "SKEW", "SPLIT", "REFUSED"),
)


def run_replay(question: ReplayQuestion, *, as_json: bool, plot: Path | None) -> None:
    """Replay, and print the table or JSON; raises :class:`NearkvError` for what cannot be asked."""
    draw = None if plot is None else _drawer(plot)
    # Every decision would be logged: thousands a second, all in the figures anyway.
    quiet = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=quiet, cache_logger_on_first_use=False)
    with _progress() as tell:
        rows = run_all(question, progress=tell)
    if plot is not None and draw is not None:
        _write_drawings(plot, draw, question.trace.name, rows)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(rows)).decode() + "\n")
        return
    Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH).print(_table(rows))


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on standard error where somebody watches."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = {}

        def tell(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=total)
            progress.update(tasks[label], completed=done)

        yield tell


def _table(rows: Sequence[Row]) -> Table:
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for row in rows:
        figures = row.figures
        refused = " ".join(f"{why} {count}" for why, count in figures.refused.items()) or "0"
        cells = (
            row.label,
            UNKNOWN if figures.hit_ratio is None else f"{figures.hit_ratio:.4f}",
            *_milliseconds(figures.first_token_ms),
            *_milliseconds(figures.per_token_ms),
            UNKNOWN if figures.skew_ratio is None else f"{figures.skew_ratio:.2f}",
            f"{figures.split:,}",
            refused,
        )
        # Text, not str: what a file says may look like rich markup.
        table.add_row(*map(Text, cells))
    return table


def _milliseconds(values: Percentiles) -> tuple[str, ...]:
    each = (values.p50, values.p90, values.p99)
    return tuple(UNKNOWN if ms is None else _ms(ms) for ms in each)


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"  # noqa: PLR2004 (three digits)


def _drawer(path: Path) -> Drawer:
    """Return what draws the kind of file that a name stands for; a replay may take minutes."""
    kind = path.suffix.lower()
    if kind in (".html", ".htm"):
        return lambda title, charts: page(title, charts).encode()
    if kind != ".png":
        raise ReplayError(f"--plot: {path} is neither FILE.html nor FILE.png")
    try:
        from nearkv.replay.picturing import picture  # noqa: PLC0415 (an extra: most have no use)
    except ImportError as error:
        raise ReplayError(
            f"--plot: a PNG needs Pillow ({error}); pip install 'nearkv[plots]', or name FILE.html"
        ) from error
    return picture


def _write_drawings(path: Path, draw: Drawer, trace: str, rows: Sequence[Row]) -> None:
    plotted = [Plotted(row.label, row.figures, row.first_token_curve_ms) for row in rows]
    try:
        path.write_bytes(draw(f"Replay of {trace}", charts_of(plotted)))
    except OSError as error:
        raise ReplayError(f"--plot: cannot write {path}: {error.strerror}") from error


def parse_replay_link(text: str) -> LinkProfile:
    """Parse what ``nearkv plan --link`` takes; raises :class:`ReplayError`."""
    try:
        link = parse_link(text)
    except PlanError as error:
        raise ReplayError(str(error)) from error
    return LinkProfile(link.setup_seconds, link.bytes_per_second)
