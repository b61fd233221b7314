"""A report as Markdown (pure); JSON is what it is, and the table is the command line's."""

from collections.abc import Sequence

from nearkv.report.answering import Answer


def as_markdown(answers: Sequence[Answer], basis: str) -> str:
    """Return a Markdown table; ``basis`` says what it stands on."""
    lines = ["| question | answer |", "|---|---|"]
    lines += [f"| {_cell(each.question)} | {_cell(words_of(each))} |" for each in answers]
    return "\n".join([*lines, "", f"{basis}.", ""])


def words_of(answer: Answer) -> str:
    """Return an answer in words, or why there is none."""
    return f"unknown: {answer.unknown}" if answer.unknown else answer.text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
