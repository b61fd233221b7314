"""The settings classes of the components, found by name and imported on demand."""

from importlib import import_module
from typing import Final

from nearkv.settings import ComponentSettings

COMPONENTS: Final = ("agent", "ingress", "extender")
"""Components that have settings, in the order of the documentation."""


def settings_class_of(component: str) -> type[ComponentSettings]:
    """Return ``nearkv.<component>.settings.<Component>Settings``."""
    module = import_module(f"nearkv.{component}.settings")
    found: type[ComponentSettings] = getattr(module, f"{component.capitalize()}Settings")
    return found
