"""What a check found, and the table and file that are made of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

EXIT_DONE, EXIT_FAILED, EXIT_NO_GPU = 0, 1, 2
_MAX_DETAIL_CHARACTERS = 400


class Outcome(StrEnum):
    """How a check ended. ``FOUND`` is an answer to a question that has no wrong answer."""

    PASSED = "passed"
    FAILED = "failed"
    FOUND = "found"
    SKIPPED = "skipped"


class SkippedError(Exception):
    """A check cannot be made here; the message says why."""


class WrongError(Exception):
    """Something is not as it must be; the message says what."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has to tell. ``figures`` are numbers by name, units in the names."""

    detail: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    is_question: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    name: str
    required: bool
    outcome: Outcome
    seconds: float
    detail: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_failure(self) -> bool:
        """Tell whether the whole run has failed by it."""
        return self.required and self.outcome is Outcome.FAILED


def shorten(text: str) -> str:
    """Return a text in one line of a bearable length."""
    line = " ".join(text.split())
    return (
        line if len(line) <= _MAX_DETAIL_CHARACTERS else line[: _MAX_DETAIL_CHARACTERS - 3] + "..."
    )


def exit_code(results: Sequence[Result]) -> int:
    """Return 1 when a required check failed, else 0."""
    return EXIT_FAILED if any(result.is_failure for result in results) else EXIT_DONE


def format_figure(name: str, value: float) -> str:
    """Return a figure with its name, short."""
    return f"{name} {value:.3g}" if abs(value) < 1000 else f"{name} {value:,.0f}"


def line_of(result: Result) -> str:
    """Return a result as a line of the table."""
    needed = "required" if result.required else ""
    said = [format_figure(name, value) for name, value in result.figures.items()]
    if result.detail:
        said.append(result.detail)
    text = f"{result.name:24} {result.outcome.value:8} {needed:9} {result.seconds:6.1f}s  "
    return (text + "; ".join(said)).rstrip()


def write_results(path: Path, device: Mapping[str, object], results: Sequence[Result]) -> None:
    """Write everything as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "device": dict(device),
        "passed": exit_code(results) == EXIT_DONE,
        "checks": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
