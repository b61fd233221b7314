"""Merge the sources, check the result, and say for each value where it came from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nearkv.errors import SettingsError
from nearkv.settings.base import ComponentSettings
from nearkv.settings.layers import (
    Layer,
    Source,
    read_environment,
    read_file,
    read_flags,
    suggest,
)
from nearkv.settings.options import (
    KeyPath,
    Option,
    element_of,
    env_prefix,
    group_of,
    list_options,
)

S = TypeVar("S", bound=ComponentSettings)
S_co = TypeVar("S_co", bound=ComponentSettings, covariant=True)
_LONGEST_SHOWN_VALUE = 60


@dataclass(frozen=True, slots=True)
class Resolved(Generic[S_co]):
    """Checked settings, and the source of each value that is not a default."""

    settings: S_co
    sources: Mapping[KeyPath, Source]
    options: Sequence[Option]


def resolve_settings(
    settings_class: type[S],
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    component: str,
    config_path: str | None = None,
) -> Resolved[S]:
    """Read flags, environment and file, and merge them: flag > env > file > default.

    The file is ``config_path``, else the one that ``NEARKV_<COMPONENT>_CONFIG`` names,
    else none. Raises ``SettingsError`` with every problem of every source at once.
    """
    options = list_options(settings_class, component)
    path = config_path or environment.get(f"{env_prefix(component)}CONFIG")
    layers = [
        read_flags(arguments, options),
        read_environment(environment, options, component),
        *([read_file(Path(path), options)] if path else []),
    ]
    problems = [problem for layer in layers for problem in layer.problems]
    owners = _owners(layers)
    values = {path: layer.values[path] for path, layer in owners.items()}
    try:
        settings = settings_class(**_nested(values))
    except ValidationError as error:
        problems += _problems(error, settings_class, options, owners)
        raise SettingsError(problems) from error
    if problems:
        raise SettingsError(problems)
    return Resolved(settings, {path: layer.source for path, layer in owners.items()}, options)


def _owners(layers: Sequence[Layer]) -> dict[KeyPath, Layer]:
    return {path: layer for layer in reversed(layers) for path in layer.values}


def _nested(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    # Shorter paths first: an empty group must not replace the keys set in it elsewhere.
    for path, value in sorted(values.items(), key=lambda item: len(item[0])):
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree


def _problems(
    error: ValidationError,
    settings_class: type[BaseModel],
    options: Sequence[Option],
    owners: Mapping[KeyPath, Layer],
) -> Iterator[str]:
    by_path = {option.path: option for option in options}
    for detail in error.errors(include_url=False, include_context=False):
        names = tuple(str(part) for part in detail["loc"])
        path = next((names[:n] for n in range(len(names), 0, -1) if names[:n] in by_path), names)
        option = by_path.get(path)
        yield f"{_dotted(detail['loc'])}: " + _explain(
            detail, settings_class, option, owners.get(path)
        )


def _explain(
    detail: ErrorDetails,
    settings_class: type[BaseModel],
    option: Option | None,
    owner: Layer | None,
) -> str:
    location = detail["loc"]
    if detail["type"] == "extra_forbidden":
        known = _keys_at(settings_class, location[:-1])
        return f"unknown key{_origin(option, owner)}{suggest(str(location[-1]), known)}"
    if detail["type"] == "missing" and option is not None and len(location) == len(option.path):
        return f"is required; set {option.flag}, {option.env} or {option.key} in the file"
    if detail["type"] == "missing":
        return f"is required{_origin(option, owner)}"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{message}{_got(detail, option)}{_origin(option, owner)}"


def _got(detail: ErrorDetails, option: Option | None) -> str:
    """Name the value's type, and the value unless it may be secret or is long.

    Checks of our own on anything but numbers say themselves what they got.
    """
    value = detail["input"]
    if detail["type"] == "value_error" and not isinstance(value, (int, float)):
        return ""
    text = f", got {type(value).__name__}"
    plain = option is not None and not option.secret and len(detail["loc"]) == len(option.path)
    if not plain or not isinstance(value, (str, int, float)):
        return text
    shown = repr(value)
    return f"{text} {shown}" if len(shown) <= _LONGEST_SHOWN_VALUE else text


def _origin(option: Option | None, owner: Layer | None) -> str:
    if option is None or owner is None:
        return ""
    names = {Source.FLAG: option.flag, Source.ENV: option.env, Source.FILE: owner.origin}
    return f" (from {names[owner.source]})"


def _dotted(location: Sequence[str | int]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".") or "settings"


def _keys_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """List the keys that are known at a place in the tree, as far as types tell."""
    annotation: object = model
    for part in location:
        group = group_of(annotation)
        if isinstance(part, int):
            annotation = element_of(annotation)
        elif group is not None and part in group.model_fields:
            annotation = group.model_fields[part].annotation
        else:
            return []
    group = group_of(annotation)
    return list(group.model_fields) if group is not None else []
