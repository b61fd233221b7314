"""``nearkv lint-scheduler``: what kube-scheduler would do with a configuration."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from nearkv.errors import NearkvError
from nearkv.scheduler_config.findings import Finding, Report, Severity
from nearkv.scheduler_config.linting import lint

_FAILED_STATUS = 1
_LARGEST_BYTES = 4 << 20
# As in status: long lines are left to the terminal.
_LINE_WIDTH = 10_000
_STYLES = {"error": "red", "warning": "yellow", "info": "dim"}


class LintError(NearkvError):
    """The file cannot be read."""


def run_lint(file: Path, *, as_json: bool) -> int:
    """Print the report; return the exit status, 1 when something would fail.

    ``-`` reads standard input. Raises :class:`LintError` for a file that cannot be read.
    """
    report = lint(_read(file))
    if as_json:
        document = {
            "file": str(file),
            "ok": not report.has_errors,
            "findings": [_as_json(finding) for finding in report.findings],
            "behaviour": list(report.behaviour),
        }
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")
    else:
        _print(file, report)
    return _FAILED_STATUS if report.has_errors else 0


def _read(file: Path) -> str:
    try:
        if str(file) == "-":
            body = sys.stdin.buffer.read(_LARGEST_BYTES + 1)
        else:
            with file.open("rb") as stream:
                body = stream.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise LintError(f"FILE: cannot read {file}: {error.strerror}") from error
    if len(body) > _LARGEST_BYTES:
        raise LintError(f"FILE: {file} holds more than {_LARGEST_BYTES >> 20} MiB")
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise LintError(f"FILE: {file} is not UTF-8: {error.reason} at {error.start}") from error


def _as_json(finding: Finding) -> dict[str, Any]:
    return {**asdict(finding), "severity": finding.severity.value}


def _print(file: Path, report: Report) -> None:
    console = Console(width=_LINE_WIDTH, highlight=False, markup=False, emoji=False)
    for finding in report.findings:
        verdict = finding.severity.value
        console.print(
            Text(f"{file}:{finding.line}: ")
            + Text(verdict, _STYLES[verdict])
            # Text, not str: what a file says may look like rich markup.
            + Text(f": {finding.where}\n    {finding.what}\n    fix: {finding.fix}")
        )
    if report.findings:
        console.print()
    for sentence in report.behaviour:
        console.print(Text(sentence))
    errors = sum(finding.severity is Severity.ERROR for finding in report.findings)
    verdict = f"{errors} to mend" if errors else "kube-scheduler would take it"
    console.print(Text(f"{file}: {verdict}"))
