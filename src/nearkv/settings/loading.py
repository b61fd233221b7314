"""The shell around settings: what a component's ``__main__`` calls first."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from nearkv._version import __version__
from nearkv.errors import SettingsError
from nearkv.settings.base import ComponentSettings
from nearkv.settings.rendering import render_config, render_help
from nearkv.settings.resolving import resolve_settings

S = TypeVar("S", bound=ComponentSettings)
USAGE_STATUS = 2


def load_settings(
    settings_class: type[S],
    argv: Sequence[str],
    *,
    prog: str,
    env: Mapping[str, str],
    component: str,
) -> S:
    """Return a component's settings: flag > ``NEARKV_<COMPONENT>_*`` > file > default.

    ``argv`` is without the program's name. Raises ``SystemExit``: 0 after ``--help``,
    ``--version`` or ``--print-config``; 2 with every problem on standard error when the
    configuration is wrong.
    """
    try:
        own = _split_own_flags(argv)
        if own.help:
            _print_and_exit(render_help(settings_class, prog=prog, component=component))
        if own.version:
            _print_and_exit(f"{prog} {__version__}\n")
        resolved = resolve_settings(
            settings_class,
            own.rest,
            environment=env,
            component=component,
            config_path=own.config_path,
        )
        if own.print_config:
            _print_and_exit(render_config(resolved))
    except SettingsError as error:
        sys.stderr.write(_complaint(prog, error.problems))
        raise SystemExit(USAGE_STATUS) from None
    return resolved.settings


@dataclass(slots=True)
class _OwnFlags:
    """Flags that are not settings."""

    config_path: str | None = None
    print_config: bool = False
    help: bool = False
    version: bool = False
    rest: list[str] = field(default_factory=list)


def _split_own_flags(argv: Sequence[str]) -> _OwnFlags:
    own = _OwnFlags()
    queue = list(reversed(argv))
    while queue:
        argument = queue.pop()
        if argument in ("-h", "--help"):
            own.help = True
        elif argument == "--version":
            own.version = True
        elif argument == "--print-config":
            own.print_config = True
        elif argument.startswith("--config="):
            own.config_path = argument.removeprefix("--config=")
        elif argument == "--config":
            if not queue:
                raise SettingsError(["--config: needs a value (PATH)"])
            own.config_path = queue.pop()
        else:
            own.rest.append(argument)
    return own


def _print_and_exit(text: str) -> NoReturn:
    sys.stdout.write(text)
    sys.stdout.flush()
    raise SystemExit(0)


def _complaint(prog: str, problems: Sequence[str]) -> str:
    head = f"{prog}: the configuration is wrong:"
    return "\n".join([head, *(f"  {line}" for line in problems), f"See: {prog} --help", ""])
