"""What can be set: one ``Option`` for each leaf of a component's settings tree.

Flags, environment names, help and documentation are all derived from this list, so they
cannot drift apart from the settings classes.
"""

import enum
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from nearkv.settings.address import Address

_SEQUENCES = (list, tuple, set, frozenset, Sequence)
_UNITS = ("bytes", "milliseconds", "seconds", "tokens", "blocks", "requests")
_TYPE_NAMES: dict[object, str] = {
    bool: "BOOL",
    int: "INT",
    float: "NUMBER",
    str: "TEXT",
    SecretStr: "SECRET",
    Address: "HOST:PORT",
}

KeyPath = tuple[str, ...]


class Kind(enum.Enum):
    """How the text of a flag or of an environment variable becomes a value."""

    SCALAR = "scalar"
    BOOL = "bool"
    LIST = "list"
    JSON_LIST = "json list"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting: a leaf of the settings tree with its names in every source.

    ``element`` is the class of the elements where the setting is a list of objects.
    """

    path: KeyPath
    flag: str
    env: str
    kind: Kind
    type_name: str
    description: str
    default: object
    required: bool
    nullable: bool
    secret: bool
    element: type[BaseModel] | None

    @property
    def key(self) -> str:
        """The path in the YAML file, dotted."""
        return ".".join(self.path)

    @property
    def unit(self) -> str:
        """The unit that the name ends in, or nothing; a ratio has none."""
        return next((unit for unit in _UNITS if self.path[-1].endswith(f"_{unit}")), "")


def env_prefix(component: str) -> str:
    """Return the prefix of a component's environment variables."""
    return f"NEARKV_{component.upper()}_"


def list_options(settings_class: type[BaseModel], component: str) -> list[Option]:
    """List every setting of a class, in the order of its fields.

    Raises ``TypeError`` when a group has a default that differs from the group's own
    defaults: setting one of its keys would silently change the others.
    """
    fields = dict(_walk(settings_class, ()))
    return [
        _option(path, field, component, in_optional_group=_in_optional_group(path, fields))
        for path, field in fields.items()
        if group_of(field.annotation) is None
    ]


def group_of(annotation: object) -> type[BaseModel] | None:
    """Return the settings class that an annotation names, alone or optional, if any."""
    bare, _ = split_optional(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, BaseModel) else None


def split_optional(annotation: object) -> tuple[Any, bool]:
    """Return an annotation without ``Annotated`` and ``None``, and if ``None`` was there."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    members = get_args(annotation)
    rest = [member for member in members if member is not type(None)]
    nullable = len(rest) < len(members)
    if len(rest) == 1:
        return split_optional(rest[0])[0], nullable
    return annotation, nullable


def element_of(annotation: object) -> Any | None:  # noqa: ANN401 - annotations have no common type
    """Return the element annotation of a list-like annotation, else ``None``."""
    bare, _ = split_optional(annotation)
    if (get_origin(bare) or bare) not in _SEQUENCES:
        return None
    return next(iter(get_args(bare)), str)


def _walk(model: type[BaseModel], above: KeyPath) -> Iterator[tuple[KeyPath, FieldInfo]]:
    for name, field in model.model_fields.items():
        path = (*above, name)
        yield path, field
        group = group_of(field.annotation)
        if group is not None:
            _check_group_default(path, field, group)
            yield from _walk(group, path)


def _in_optional_group(path: KeyPath, fields: Mapping[KeyPath, FieldInfo]) -> bool:
    groups = (fields[path[:n]] for n in range(1, len(path)))
    return any(not group.is_required() and _default(group) is None for group in groups)


def _check_group_default(path: KeyPath, field: FieldInfo, group: type[BaseModel]) -> None:
    default = _default(field)
    if isinstance(default, BaseModel) and default != group():
        raise TypeError(f"{'.'.join(path)}: move its defaults into {group.__name__}")


def _default(field: FieldInfo) -> object:
    if field.is_required():
        return None
    return field.get_default(call_default_factory=True, validated_data={})


def _option(path: KeyPath, field: FieldInfo, component: str, *, in_optional_group: bool) -> Option:
    bare, nullable = split_optional(field.annotation)
    return Option(
        path=path,
        flag="--" + ".".join(path).replace("_", "-"),
        env=env_prefix(component) + "__".join(path).upper(),
        kind=_kind(bare),
        type_name=_type_name(bare),
        description=" ".join((field.description or "").split()),
        default=_default(field),
        required=field.is_required() and not in_optional_group,
        nullable=nullable,
        secret=bare is SecretStr,
        element=group_of(element_of(bare)),
    )


def _kind(bare: object) -> Kind:
    if bare is bool:
        return Kind.BOOL
    element = element_of(bare)
    if element is not None:
        return Kind.JSON_LIST if _is_nested(element) else Kind.LIST
    members = get_args(bare) if get_origin(bare) in (Union, types.UnionType) else (bare,)
    return Kind.JSON if any(_is_nested(member) for member in members) else Kind.SCALAR


def _is_nested(annotation: object) -> bool:
    bare, _ = split_optional(annotation)
    if get_origin(bare) in (Union, types.UnionType):
        return any(_is_nested(member) for member in get_args(bare))
    if group_of(bare) is not None or element_of(bare) is not None:
        return True
    return (get_origin(bare) or bare) in (dict, Mapping)


def _type_name(bare: object) -> str:
    element = element_of(bare)
    if element is not None:
        return "JSON" if _is_nested(element) else f"{_type_name(split_optional(element)[0])}..."
    if _is_nested(bare):
        return "JSON"
    if get_origin(bare) is Literal:
        return "|".join(str(choice) for choice in get_args(bare))
    if isinstance(bare, type) and issubclass(bare, enum.Enum):
        return "|".join(str(member.value) for member in bare)
    if isinstance(bare, type) and issubclass(bare, PurePath):
        return "PATH"
    return _TYPE_NAMES.get(bare, getattr(bare, "__name__", "VALUE").upper())
