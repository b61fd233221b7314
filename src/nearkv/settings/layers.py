"""The three sources of settings, each read into a ``Layer`` of raw values.

Reading checks names only (is there such a key, flag, variable?) and collects every
mistake; values are checked once, after merging, by pydantic.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from nearkv.errors import SettingsError
from nearkv.settings.options import KeyPath, Kind, Option, env_prefix

MASK = "**********"
"""What pydantic prints in place of a secret."""

_JSON_LIST_START = re.compile(r"\s*\[\s*[\"\]{]")
_SERVICE_LINK = re.compile(r"(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


class Source(Enum):
    """Where a value comes from; earlier ones win."""

    FLAG = "flag"
    ENV = "env"
    FILE = "file"
    DEFAULT = "default"


@dataclass(slots=True)
class Layer:
    """Raw values of one source by path, and the mistakes met while reading it."""

    source: Source
    origin: str = ""
    values: dict[KeyPath, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def suggest(wrong: str, known: Sequence[str]) -> str:
    """Return ``; did you mean X?`` for the nearest known name, or nothing."""
    near = get_close_matches(wrong, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def read_flags(arguments: Sequence[str], options: Sequence[Option]) -> Layer:
    """Read ``--key value``, ``--key=value``, ``--switch`` and ``--no-switch``.

    A list is given by repeating its flag; a list of objects by a JSON array, or by a
    JSON object for each repetition.
    """
    layer = Layer(Source.FLAG)
    by_flag = {option.flag: option for option in options}
    negated = {_negated(option): option for option in options if option.kind is Kind.BOOL}
    known = [*by_flag, *negated]
    for flag, value in _pair_up(arguments, by_flag, layer.problems):
        if flag in negated and value is None:
            layer.values[negated[flag].path] = False
        elif flag not in by_flag:
            layer.problems.append(f"{flag}: unknown option{suggest(flag, known)}")
        else:
            _take_flag(by_flag[flag], value, layer)
    return layer


def read_environment(
    environment: Mapping[str, str], options: Sequence[Option], component: str
) -> Layer:
    """Read ``NEARKV_<COMPONENT>_*``, nested keys joined by two underscores.

    Lists are comma-separated or JSON; lists of objects are JSON. An empty value means
    "not set" for an optional setting and "empty" for a list. The variables that
    Kubernetes adds for a Service called like the component are passed over.
    """
    layer = Layer(Source.ENV)
    by_env = {option.env: option for option in options}
    prefix = env_prefix(component)
    names = (name for name in sorted(environment) if name.startswith(prefix))
    for name in names:
        if name == f"{prefix}CONFIG" or _is_service_link(name, environment):
            continue
        if name in by_env:
            _store(by_env[name], name, layer, environment[name])
        else:
            layer.problems.append(f"{name}: unknown variable{suggest(name, [*by_env])}")
    return layer


def read_file(path: Path, options: Sequence[Option]) -> Layer:
    """Read a YAML file.

    Raises ``SettingsError`` when there is no such file or when it is not YAML; then
    nothing else about it can be checked.
    """
    layer = Layer(Source.FILE, origin=str(path))
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)  # noqa: S506 - derives from SafeLoader
    except OSError as error:
        raise SettingsError([f"{path}: cannot be read: {error.strerror}"]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError([f"{path}: is not valid YAML: {error}"]) from error
    leaves = {option.path: option for option in options}
    _take_mapping(document, (), leaves, layer)
    return layer


def _pair_up(
    arguments: Sequence[str], by_flag: Mapping[str, Option], problems: list[str]
) -> Iterator[tuple[str, str | None]]:
    """Yield flags with their values; ``None`` where a flag has none."""
    queue = list(reversed(arguments))
    while queue:
        flag, equals, attached = queue.pop().partition("=")
        if not flag.startswith("--"):
            problems.append(f"{flag}: unexpected argument")
        elif equals:
            yield flag, attached
        elif flag in by_flag and by_flag[flag].kind is Kind.BOOL:
            yield flag, None
        else:
            has_value = bool(queue) and not queue[-1].startswith("--")
            takes_value = flag in by_flag or not flag.startswith("--no-")
            yield flag, queue.pop() if has_value and takes_value else None


def _negated(option: Option) -> str:
    *above, last = option.flag.removeprefix("--").split(".")
    return "--" + ".".join([*above, f"no-{last}"])


def _take_flag(option: Option, value: str | None, layer: Layer) -> None:
    if value is None and option.kind is not Kind.BOOL:
        layer.problems.append(f"{option.flag}: needs a value ({option.type_name})")
        return
    text = "true" if value is None else value
    if option.kind is Kind.LIST:
        layer.values.setdefault(option.path, []).append(text)
    elif option.kind is Kind.JSON_LIST:
        earlier = layer.values.pop(option.path, None) or []
        _store(option, option.flag, layer, text)
        layer.values[option.path] = [*earlier, *(layer.values.get(option.path) or [])]
    else:
        _store(option, option.flag, layer, text)


def _store(option: Option, name: str, layer: Layer, text: str) -> None:
    try:
        layer.values[option.path] = _parsed(option, text)
    except json.JSONDecodeError as error:
        layer.problems.append(f"{name}: is not valid JSON: {error}")


def _parsed(option: Option, text: str) -> Any:  # noqa: ANN401 - raw values are checked later
    if not text.strip() and option.nullable:
        return None
    if option.kind is Kind.LIST:
        # "[::1]:80" is an address, not JSON: a JSON list starts with a quote or is empty.
        if _JSON_LIST_START.match(text):
            return json.loads(text)
        return [part.strip() for part in text.split(",") if part.strip()]
    if option.kind is Kind.JSON_LIST:
        value = json.loads(text) if text.strip() else []
        return value if isinstance(value, list) else [value]
    return json.loads(text) if option.kind is Kind.JSON else text


def _is_service_link(name: str, environment: Mapping[str, str]) -> bool:
    """Tell if Kubernetes set a variable to advertise a Service to the pod.

    A Service "nearkv-ingress" puts NEARKV_INGRESS_SERVICE_HOST, NEARKV_INGRESS_PORT and
    more into every pod of its namespace (Kubernetes documentation, "Service discovery").
    """
    return any(
        other.endswith("_SERVICE_HOST")
        and name.startswith(service := other.removesuffix("SERVICE_HOST"))
        and _SERVICE_LINK.fullmatch(name.removeprefix(service)) is not None
        for other in environment
    )


def _take_mapping(
    node: object, above: KeyPath, leaves: Mapping[KeyPath, Option], layer: Layer
) -> None:
    if node is None:
        return
    if not isinstance(node, dict):
        where = ".".join(above) or layer.origin
        layer.problems.append(f"{where}: expected a mapping, got {type(node).__name__}")
        return
    if above and not node:
        # "tls: {}" is not the same as no tls: its missing keys must be asked for.
        layer.values[above] = {}
    siblings = list(dict.fromkeys(p[len(above)] for p in leaves if p[: len(above)] == above))
    for key, value in node.items():
        path = (*above, str(key))
        if path in leaves:
            _take_leaf(path, value, layer)
        elif str(key) in siblings:
            _take_mapping(value, path, leaves, layer)
        else:
            hint = suggest(str(key), siblings) or suggest(str(key), [".".join(p) for p in leaves])
            layer.problems.append(f"{'.'.join(path)}: unknown key in {layer.origin}{hint}")


def _take_leaf(path: KeyPath, value: object, layer: Layer) -> None:
    if _holds_mask(value):
        layer.problems.append(
            f"{'.'.join(path)}: holds {MASK}, which --print-config prints in place of a secret"
        )
    layer.values[path] = value


def _holds_mask(value: object) -> bool:
    if isinstance(value, dict):
        return any(_holds_mask(item) for item in value.values())
    if isinstance(value, list):
        return any(_holds_mask(item) for item in value)
    return value == MASK


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that refuses a key given twice; PyYAML keeps the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
        """Build a mapping; raise ``ConstructorError`` at a key that was there already."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen and isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)
