"""Settings as text: ``--help``, ``--print-config`` and the documentation table."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence

import yaml
from pydantic import BaseModel, SecretStr

from nearkv.settings.base import ComponentSettings
from nearkv.settings.layers import Source
from nearkv.settings.options import KeyPath, Kind, Option, env_prefix, list_options
from nearkv.settings.resolving import Resolved

_HELP_WIDTH = 88
_HELP_INDENT = " " * 8


def render_help(settings_class: type[ComponentSettings], *, prog: str, component: str) -> str:
    """Render the text of ``--help``: each option with default, unit and variable."""
    summary = (settings_class.__doc__ or "").strip().partition("\n")[0]
    lines = [
        f"Usage: {prog} [--config PATH] [--KEY VALUE ...]",
        "",
        *([summary, ""] if summary else []),
        "A flag wins over its environment variable, that over the YAML file, that over the",
        "default. Repeat a flag marked '...' for each element.",
        "",
        "  --config PATH",
        f"{_HELP_INDENT}YAML file to read. [env: {env_prefix(component)}CONFIG]",
        "  --print-config",
        f"{_HELP_INDENT}Print the effective settings with the source of each, and stop.",
        "  --version",
        f"{_HELP_INDENT}Print the version, and stop.",
        "  --help",
        f"{_HELP_INDENT}Print this text, and stop.",
    ]
    for option in list_options(settings_class, component):
        lines += _help_entry(option)
    return "\n".join(lines) + "\n"


def render_config(resolved: Resolved[ComponentSettings]) -> str:
    """Render effective settings as YAML, each value with its source as a comment.

    Secrets are masked; a file that still holds the mask is refused when it is read.
    """
    dumped = resolved.settings.model_dump(mode="json")
    groups = {option.path[:n] for option in resolved.options for n in range(1, len(option.path))}
    by_path = {option.path: option for option in resolved.options}

    def comment(path: KeyPath) -> str:
        source = resolved.sources.get(path, Source.DEFAULT)
        option = by_path.get(path)
        if option is None:
            return source.value
        names = {Source.FLAG: f" {option.flag}", Source.ENV: f" {option.env}"}
        return source.value + names.get(source, "")

    def lines(node: Mapping[str, object], above: KeyPath) -> Iterator[str]:
        for name, value in node.items():
            path = (*above, name)
            if path in groups and isinstance(value, dict):
                yield f"{name}:"
                yield from (f"  {line}" for line in lines(value, path))
            else:
                yield from _commented(name, value, comment(path))

    return "\n".join(lines(dumped, ())) + "\n"


def render_table(settings_class: type[ComponentSettings], component: str) -> str:
    """Render a markdown table of all settings: key, default, variable, description."""
    rows = [
        "| Key | Type | Default | Environment variable | Description |",
        "|---|---|---|---|---|",
    ]
    for option in list_options(settings_class, component):
        rows.append(_row(option, key=option.key, env=f"`{option.env}`"))
        rows += [
            _row(part, key=f"{option.key}[].{part.key}", env="")
            for part in _parts_of_element(option)
        ]
    return "\n".join(rows) + "\n"


def show_default(option: Option) -> str:
    """Return a default as people read it, with its unit."""
    if option.required:
        return "required"
    if option.default is None:
        return "not set"
    shown = _shown(option.default)
    return f"{shown} {option.unit}" if option.unit else shown


def _row(option: Option, *, key: str, env: str) -> str:
    cells = (
        f"`{key}`",
        _escape(option.type_name),
        _escape(show_default(option)),
        env,
        _escape(option.description),
    )
    return "| " + " | ".join(cells) + " |"


def _parts_of_element(option: Option) -> Sequence[Option]:
    return [] if option.element is None else list_options(option.element, "")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, SecretStr):
        return "set" if value.get_secret_value() else "not set"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(_shown(item) for item in value) or "empty"
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    if isinstance(value, dict):
        return str(value) if value else "empty"
    text = str(getattr(value, "value", value))
    return text or '""'


def _help_entry(option: Option) -> Sequence[str]:
    if option.kind is Kind.BOOL:
        *above, last = option.flag.removeprefix("--").split(".")
        head = f"  {option.flag} / --{'.'.join([*above, f'no-{last}'])}"
    else:
        head = f"  {option.flag} {option.type_name}"
    notes = f"[default: {show_default(option)}] [env: {option.env}]"
    if option.required:
        notes = f"[required] [env: {option.env}]"
    parts = [f"{part.key} [{show_default(part)}]" for part in _parts_of_element(option)]
    return (
        head,
        *_wrap(f"{option.description} {notes}".strip()),
        *(_wrap(f"Keys of each, with defaults: {', '.join(parts)}") if parts else []),
    )


def _wrap(text: str) -> Sequence[str]:
    return textwrap.wrap(
        text,
        width=_HELP_WIDTH,
        initial_indent=_HELP_INDENT,
        subsequent_indent=_HELP_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _commented(name: str, value: object, comment: str) -> Iterator[str]:
    text = yaml.safe_dump(
        {name: value}, sort_keys=False, allow_unicode=True, width=2**16, default_flow_style=False
    )
    first, *rest = text.rstrip("\n").split("\n")
    if rest and isinstance(value, str):
        # Inside a quoted text of several lines, "#" would be part of the text.
        yield f"# {comment}"
        yield first
    else:
        yield f"{first}  # {comment}"
    yield from rest


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
