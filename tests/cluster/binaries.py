"""Where the real binaries are, if anywhere."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "KUBE_BIN_DIR"
NAMES = ("etcd", "kube-apiserver", "kube-scheduler")


@dataclass(frozen=True, slots=True)
class Binaries:
    """The folder, and what is missing in it; ``None`` is not set."""

    folder: Path | None
    missing: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether all of them can be run."""
        return self.folder is not None and not self.missing

    def path(self, name: str) -> str:
        """Return the path of one."""
        assert self.folder is not None
        return str(self.folder / name)


def find_binaries(environment: Mapping[str, str] = os.environ) -> Binaries:
    """Return what ``KUBE_BIN_DIR`` has."""
    given = environment.get(VARIABLE, "")
    if not given:
        return Binaries(None)
    folder = Path(given).absolute()
    missing = tuple(name for name in NAMES if not os.access(folder / name, os.X_OK))
    return Binaries(folder, missing)
