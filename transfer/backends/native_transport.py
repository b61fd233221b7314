"""One native transport per process, and what goes into its environment.

``ucxx`` and ``nixl`` each bring a UCX of their own. Two of them in one process share signal
handlers, memory hooks and symbols, which works until it does not; a mover uses one backend, so
a second one is refused.
"""

import os
import sys
from collections.abc import Mapping
from typing import Final

from nearkv.transfer.errors import PullError, Reason

_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "ucx": ("ucxx", "libucx"),
    "nixl": ("nixl", "nixl_cu12", "nixl_cu13"),
}

_RDMA_TRANSPORTS = ("rc", "dc", "ud", "ib", "srd", "gga")
"""How the names of UCX's RDMA transports begin: rc_mlx5, dc_x, ud_verbs, srd (EFA)..."""


def check_alone(backend: str) -> None:
    """Raise :class:`PullError` (``NO_PATH``) when this process holds another transport's UCX."""
    for other, packages in _PACKAGES.items():
        if other != backend and any(package in sys.modules for package in packages):
            raise PullError(
                Reason.NO_PATH,
                f"this process has loaded {other}, which brings another UCX: "
                f"{backend} needs a process of its own",
            )


def set_defaults(defaults: Mapping[str, str]) -> None:
    """Set environment variables that the user has not set; native libraries read them at load."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def is_rdma(transport: str) -> bool:
    """Tell whether a UCX transport, such as ``rc_mlx5/mlx5_0:1``, bypasses the kernel."""
    name = transport.split("/", 1)[0]
    return name.split("_", 1)[0] in _RDMA_TRANSPORTS
