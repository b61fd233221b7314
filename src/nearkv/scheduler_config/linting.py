"""Lint a file that holds a KubeSchedulerConfiguration, plain or inside a ConfigMap (pure)."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from nearkv.scheduler_config.checking_shapes import REFUSES, check_shape
from nearkv.scheduler_config.describing import describe
from nearkv.scheduler_config.extender_rules import Entry, check_entry
from nearkv.scheduler_config.findings import Finding, Report, Severity
from nearkv.scheduler_config.reading import (
    BrokenYaml,
    Document,
    list_of,
    mapping_of,
    read_documents,
)
from nearkv.scheduler_config.scheduler_rules import check_scheduler
from nearkv.scheduler_config.shapes import API_VERSION, CONFIGURATION, KIND

_GROUP = "kubescheduler.config.k8s.io"


@dataclass(slots=True)
class _Gathering:
    findings: list[Finding] = field(default_factory=list)
    behaviour: list[str] = field(default_factory=list)
    configurations: int = 0
    others: list[tuple[int, str]] = field(default_factory=list)


def lint(text: str) -> Report:
    """Return what kube-scheduler would make of the file."""
    gathered = _Gathering()
    _lint_text(text, gathered, first_line=1, embedded="")
    if gathered.configurations == 0:
        gathered.findings += _nothing_found(gathered)
    gathered.findings.sort(key=lambda finding: finding.line)
    return Report(gathered.findings, gathered.behaviour)


def _lint_text(text: str, gathered: _Gathering, *, first_line: int, embedded: str) -> None:
    found = 0
    for number, document in enumerate(read_documents(text, first_line)):
        if isinstance(document, BrokenYaml):
            gathered.findings.append(_broken(document))
            gathered.configurations += 1
            return
        value = mapping_of(document.value)
        if document.value is None:
            continue
        if _is_configuration(document):
            found += 1
            gathered.configurations += 1
            if number > 0 and (found > 1 or embedded):
                gathered.findings.append(_not_read(document))
            _lint_configuration(document, gathered)
        elif value.get("kind") == "ConfigMap" and not embedded:
            _lint_config_map(document, gathered)
        else:
            gathered.others.append((document.line(()), str(value.get("kind", "no kind"))))


def _is_configuration(document: Document) -> bool:
    value = mapping_of(document.value)
    version, kind = value.get("apiVersion"), value.get("kind")
    return (
        kind == KIND
        or (isinstance(version, str) and version.startswith(_GROUP))
        or (kind is None and ("extenders" in value or "profiles" in value))
    )


def _lint_config_map(document: Document, gathered: _Gathering) -> None:
    data = mapping_of(mapping_of(document.value).get("data"))
    for key, text in data.items():
        if isinstance(text, str) and (KIND in text or _GROUP in text):
            # The text of a block begins in the line after its key.
            first = document.line(("data", key)) + 1
            _lint_text(text, gathered, first_line=first, embedded=key)


def _lint_configuration(document: Document, gathered: _Gathering) -> None:
    findings = list(_check_head(document))
    findings += check_shape(document, CONFIGURATION)
    items = list_of(mapping_of(document.value).get("extenders"))
    only = len(items) == 1
    entries = [Entry(document, index, item, is_only=only) for index, item in enumerate(items)]
    for entry in entries:
        findings += check_entry(entry)
    findings += check_scheduler(document, entries)
    gathered.findings += findings
    if not any(finding.what.startswith(REFUSES) for finding in findings):
        gathered.behaviour += describe(document, entries)


def _check_head(document: Document) -> Iterator[Finding]:
    value = mapping_of(document.value)
    version, kind = value.get("apiVersion"), value.get("kind")
    if version != API_VERSION:
        old = isinstance(version, str) and version.startswith(_GROUP)
        why = f"{version} went with 1.29" if old else f"apiVersion is {version or 'missing'}"
        yield Finding(
            severity=Severity.ERROR,
            where="apiVersion",
            line=document.line(("apiVersion",)),
            what=f"{REFUSES}: {why}",
            fix=f"write apiVersion: {API_VERSION}",
        )
    if kind != KIND:
        yield Finding(
            severity=Severity.ERROR,
            where="kind",
            line=document.line(("kind",)),
            what=f"{REFUSES}: kind is {kind or 'missing'}",
            fix=f"write kind: {KIND}",
        )


def _broken(document: BrokenYaml) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        where="the file",
        line=document.line,
        what=f"{REFUSES}: this is not YAML: {document.problem}",
        fix="mend the line named here, or the one above it",
    )


def _not_read(document: Document) -> Finding:
    return Finding(
        severity=Severity.WARNING,
        where="the document",
        line=document.line(()),
        what="kube-scheduler reads the first document of a file only: this one has no effect",
        fix="put each scheduler's configuration into a file of its own",
    )


def _nothing_found(gathered: _Gathering) -> Iterator[Finding]:
    kinds = ", ".join(kind for _, kind in gathered.others) or "nothing"
    yield Finding(
        severity=Severity.ERROR,
        where="the file",
        line=1,
        what=f"{REFUSES} with this file: it holds {kinds}",
        fix=f"give a file with apiVersion: {API_VERSION} and kind: {KIND}",
    )
