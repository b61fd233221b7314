"""How the demonstration looks: progress, one line per turn, totals, a comparison."""

import json
import shlex
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from nearkv.demo.pd_report import PdTurn
from nearkv.demo.progress_board import ProgressBoard
from nearkv.demo.report import (
    PolicyReport,
    TopicReport,
    TurnReport,
    correct_predictions,
    shortcomings,
)

UNKNOWN = "-"
REASON_WIDTH = 26
PAIR_WIDTH = 31


class Screen:
    """Writes to a console; on a terminal the last line shows what goes on."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._board = ProgressBoard()
        self._status: Status | None = console.status("") if console.is_terminal else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def progress(self, line: str) -> None:
        """Show a line of progress."""
        is_news = self._board.update(line)
        if is_news and (self._status is None or not self._board.is_busy(line)):
            self.say(line)
        self._show_status(self._board.summary)

    def _show_status(self, text: str) -> None:
        """Show a text behind a spinner on a terminal; an empty text removes the spinner."""
        if self._status is None:
            return
        if text:
            self._status.update(escape(text))
            self._status.start()
        else:
            self._status.stop()

    def asking(self, document: str, turn: int) -> None:
        """Show that a question is under way."""
        self._show_status(f"{document}, turn {turn}: waiting for the answer")

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def answered(self, document: str, turn: TurnReport) -> None:
        """Print the line of a turn, with a heading before the first of a document."""
        self._show_status("")
        if turn.turn == 1:
            self.say(f"\n{document}\n{turn_heading()}")
        self.say(turn_line(turn))

    def totals(self, report: PolicyReport) -> None:
        """Print what the engines counted, per document."""
        self.say("")
        self._console.print(totals_table(report))
        right, comparable = correct_predictions(report.turns)
        self.say(f"predicted cached tokens were right in {right} of {comparable} requests")

    def comparison(self, reports: Sequence[PolicyReport]) -> None:
        """Print the policies side by side."""
        self.say("")
        self._console.print(comparison_table(reports))

    def verdict(self, report: PolicyReport) -> None:
        """Print whether the run met its bars, and why not."""
        reasons = shortcomings(report)
        if not reasons:
            self.say("every follow-up went to the engine that holds the document")
        for reason in reasons:
            self.say(f"NOT MET: {reason}")


def turn_heading() -> str:
    """Give the heading above the lines of turns."""
    return (
        f"{'turn':>4}  {'engine':<9} {'reason':<{REASON_WIDTH}} "
        f"{'prompt':>7} {'cached':>7} {'predicted':>9} {'TTFT':>8}"
    )


def turn_line(turn: TurnReport) -> str:
    """Give the line of a turn, in columns below the heading."""
    return (
        f"{turn.turn:>4}  {turn.engine:<9} {turn.reason[:REASON_WIDTH]:<{REASON_WIDTH}} "
        f"{turn.prompt_tokens:>7} {_count(turn.cached_tokens):>7} "
        f"{_count(turn.predicted_cached_tokens):>9} {duration(turn.ttft_seconds):>8}"
    )


def pd_turn_heading() -> str:
    """Give the heading above the lines of turns that were split."""
    return (
        f"{'turn':>4}  {'prefill -> decode':<{PAIR_WIDTH}} {'prompt':>6} {'computed':>8} "
        f"{'cached':>6} {'pulled':>6}  {'path':<5} {'size':>8} {'took':>7} {'TTFT':>7}"
    )


def pd_turn_line(turn: PdTurn) -> str:
    """Give the line of a turn; ``computed``, ``cached`` and ``pulled`` are the decoder's."""
    engines = f"{turn.prefill_engine or UNKNOWN} -> {turn.decode_engine}"
    return (
        f"{turn.turn:>4}  {engines:<{PAIR_WIDTH}} {turn.prompt_tokens:>6} "
        f"{turn.computed_tokens:>8} {turn.cached_tokens:>6} {turn.pulled_tokens:>6}  "
        f"{turn.path or UNKNOWN:<5} {turn.size_bytes / 1e6:>5.1f} MB "
        f"{duration(turn.seconds):>7} {duration(turn.ttft_seconds):>7}"
    )


def _count(tokens: int | None) -> str:
    return UNKNOWN if tokens is None else str(tokens)


def duration(seconds: float | None) -> str:
    """Write a time with three digits at most: ``8.13 s``, ``54 ms``."""
    if seconds is None:
        return UNKNOWN
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def totals_table(report: PolicyReport) -> Table:
    """Make the table of totals; its numbers of tokens come from the engines."""
    table = _compact_table("Prompt tokens, as the engines counted them")
    table.add_column("document", no_wrap=True)
    for heading in (
        *("turns", "no reuse", "computed", "cached"),
        *("reduction", "TTFT 1st", "TTFT later"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for topic in report.topics:
        table.add_row(topic.document, *totals_row(topic))
    return table


def _compact_table(title: str) -> Table:
    """Make an empty table whose eight columns fit in 80 characters."""
    return Table(
        title=title,
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def totals_row(topic: TopicReport) -> tuple[str, ...]:
    """Give the cells of one document."""
    return (
        str(len(topic.turns)),
        f"{topic.without_reuse_tokens:,}",
        f"{topic.counted.computed:,}",
        f"{topic.counted.cached:,}",
        f"{topic.reduction_ratio:.1%}",
        duration(topic.ttft_first_seconds),
        duration(topic.ttft_follow_up_seconds),
    )


def comparison_table(reports: Sequence[PolicyReport]) -> Table:
    """Make the table of policies, over the document with the full number of rounds."""
    table = _compact_table(f"{reports[0].main.document} under each policy")
    table.add_column("policy", no_wrap=True)
    for heading in (
        *("no reuse", "computed", "reduction"),
        *("TTFT 1st", "TTFT later", "strayed"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        table.add_row(report.policy, *comparison_row(report.main))
    return table


def comparison_row(topic: TopicReport) -> tuple[str, ...]:
    """Give the cells of one policy; ``strayed`` counts follow-ups that left the first engine."""
    return (
        f"{topic.without_reuse_tokens:,}",
        f"{topic.counted.computed:,}",
        f"{topic.reduction_ratio:.1%}",
        duration(topic.ttft_first_seconds),
        duration(topic.ttft_follow_up_seconds),
        str(len(topic.strays)),
    )


def curl_line(url: str, model_name: str) -> str:
    """Give a command that asks the ingress a question and shows the routing headers."""
    body = {
        "model": model_name,
        "messages": [{"role": "user", "content": "What is a KV cache?"}],
        "max_tokens": 48,
    }
    return (
        f"curl -i {url}/v1/chat/completions -H 'content-type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )
