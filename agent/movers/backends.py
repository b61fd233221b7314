"""The transports that a mover knows, by name; each is imported when it is first asked for."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from nearkv.transfer.backends.contract import Backend, Link, Region, Source
from nearkv.transfer.errors import PullError, Reason

Constructor = Callable[..., Backend]
"""Makes a backend from the keyword arguments of its options."""

STORE = "store"
"""The shared store, a backend for pulls only; see ``storing``."""

MODULES = {
    "shm": ("nearkv.transfer.backends.shm", "ShmBackend"),
    "cuda": ("nearkv.transfer.cuda.device_backend", "CudaBackend"),
    "tcp": ("nearkv.agent.movers.securing", "tcp_backend"),
    "ucx": ("nearkv.transfer.backends.ucx", "UcxBackend"),
    "nixl": ("nearkv.transfer.backends.nixl", "NixlBackend"),
    STORE: ("nearkv.agent.movers.storing", "StoreBackend"),
}
"""Module and constructor of each backend."""


@runtime_checkable
class LocalBackend(Protocol):
    """A backend for sources of the same node, which are mapped here."""

    def link(self, source: Source, target: Region) -> Link:
        """Make a link between two mapped memories; raises ``PullError``."""
        ...


class Backends:
    """Backends by name, made once each; ``constructors`` come before the built-in ones."""

    def __init__(self, constructors: Mapping[str, Constructor] | None = None) -> None:
        self._constructors = dict(constructors or {})
        self._options: dict[str, dict[str, Any]] = {}
        self._made: dict[str, Backend] = {}

    def configure(self, options: Mapping[str, dict[str, Any]]) -> None:
        """Take the keyword arguments that backends are made with."""
        self._options = dict(options)

    def get(self, name: str) -> Backend:
        """Return a backend; raises :class:`PullError` (``NO_PATH``) for an unknown name.

        Two threads that ask at the same time may make it twice, which does no harm: making
        one loads nothing.
        """
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self._constructor(name)(**self._options.get(name, {}))
        return made

    def local(self, name: str) -> LocalBackend:
        """Return a backend for the same node; raises :class:`PullError` (``NO_PATH``)."""
        backend = self.get(name)
        if not isinstance(backend, LocalBackend):
            raise PullError(Reason.NO_PATH, f"{name} is no way within a node")
        return backend

    def _constructor(self, name: str) -> Constructor:
        if name in self._constructors:
            return self._constructors[name]
        if name not in MODULES:
            raise PullError(Reason.NO_PATH, f"there is no backend {name!r}")
        module, attribute = MODULES[name]
        constructor: Constructor = getattr(importlib.import_module(module), attribute)
        return constructor
