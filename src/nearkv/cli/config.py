"""``nearkv config``: the effective configuration of a component, or its schema."""

import os
import sys
from collections.abc import Sequence

import msgspec

from nearkv.cli.components import settings_class_of
from nearkv.settings import load_settings


def print_config(component: str, arguments: Sequence[str]) -> None:
    """Print effective settings as YAML; ends the program as ``load_settings`` says."""
    load_settings(
        settings_class_of(component),
        [*arguments, "--print-config"],
        prog=f"nearkv-{component}",
        env=os.environ,
        component=component,
    )


def print_schema(component: str) -> None:
    """Print the JSON schema of a component's settings, for editors and charts."""
    schema = settings_class_of(component).model_json_schema()
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(schema)).decode() + "\n")
