"""Keys that kube-scheduler does not know, keys that come twice, values of the wrong type (pure)."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from nearkv.scheduler_config.durations import parse_go_duration
from nearkv.scheduler_config.findings import Finding, Severity
from nearkv.scheduler_config.reading import Document, Path, format_path, list_of, mapping_of
from nearkv.scheduler_config.shapes import GONE, Kind, Shape

REFUSES = "kube-scheduler refuses to start"


def check_shape(document: Document, shape: Shape) -> Iterator[Finding]:
    """Yield what keeps kube-scheduler from reading the document at all."""
    for path in document.repeated:
        yield _error(
            document,
            path,
            f"{REFUSES}: the key comes twice",
            f"keep one {path[-1]} and delete the other",
        )
    yield from _check(document, (), document.value, shape)


def _check(document: Document, path: Path, value: object, shape: Shape) -> Iterator[Finding]:
    if value is None or shape.kind is Kind.ANYTHING:
        return
    wrong = _wrong_type(value, shape.kind)
    if wrong:
        yield _error(document, path, f"{REFUSES}: {wrong}", f"write {shape.kind.value}")
    elif shape.kind is Kind.OBJECT:
        for key, item in mapping_of(value).items():
            known = shape.fields.get(key)
            if known is None:
                yield _unknown(document, (*path, key), shape.fields)
            else:
                yield from _check(document, (*path, key), item, known)
    elif shape.kind is Kind.LIST and shape.item is not None:
        for index, item in enumerate(list_of(value)):
            yield from _check(document, (*path, index), item, shape.item)


def _wrong_type(value: object, kind: Kind) -> str:
    """Return what is wrong with a value, or nothing."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    right = {
        Kind.TEXT: isinstance(value, str),
        Kind.INTEGER: isinstance(value, int) and number,
        Kind.NUMBER: number,
        Kind.SWITCH: isinstance(value, bool),
        Kind.DURATION: isinstance(value, str),
        Kind.OBJECT: isinstance(value, Mapping),
        Kind.LIST: isinstance(value, list),
    }[kind]
    if not right:
        return f"{_shown(value)} is not {kind.value}"
    if kind is Kind.DURATION:
        try:
            parse_go_duration(str(value))
        except ValueError as error:
            return str(error)
    return ""


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def _unknown(document: Document, path: Path, known: Mapping[str, Shape]) -> Finding:
    key = str(path[-1])
    by_fold = {name.lower(): name for name in known}
    meant = by_fold.get(key.lower())
    if meant is not None:
        what = f"{REFUSES}: the case of the key is wrong"
        return _error(document, path, what, f"write {meant}")
    near = get_close_matches(key.lower(), by_fold, n=1)
    if near:
        fix = f"did you mean {by_fold[near[0]]}?"
    elif key in GONE:
        fix = GONE[key]
    else:
        fix = "delete it; known here: " + ", ".join(sorted(known))
    if key in GONE and key.lower() not in by_fold:
        fix = GONE[key]
    return _error(document, path, f"{REFUSES}: it does not know this key", fix)


def _error(document: Document, path: Path, what: str, fix: str) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        where=format_path(path) or "the document",
        line=document.line(path),
        what=what,
        fix=fix,
    )
