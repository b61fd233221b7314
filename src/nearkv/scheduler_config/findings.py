"""What the lint has to say: findings, and a report of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How bad it is: kube-scheduler or pods fail; it works badly; something to know."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding: where, what kube-scheduler would do, and what to write instead.

    ``line`` counts from 1 in the file; 0 where there is none to point at.
    """

    severity: Severity
    where: str
    line: int
    what: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Findings in the order of the file, and what kube-scheduler would do, in sentences."""

    findings: Sequence[Finding]
    behaviour: Sequence[str]

    @property
    def has_errors(self) -> bool:
        """Whether something would fail."""
        return any(finding.severity is Severity.ERROR for finding in self.findings)
