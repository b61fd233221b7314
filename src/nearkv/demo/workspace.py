"""Where the demonstration keeps its files.

In a checkout everything lies under the checkout (``build/`` and ``.venv-engine``, both
ignored by git); for an installed package, under the working directory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str], None]
"""Receives one line about what is going on, such as ``engine-a: loading weights 12 s``."""

PACKAGE_DIR = Path(__file__).resolve().parent


def silent(_line: str) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folders below one root."""

    root: Path

    @classmethod
    def default(cls) -> "Workspace":
        """Use the checkout that holds this file, or the working directory if none does."""
        checkout = PACKAGE_DIR.parents[2]
        return cls(checkout if (checkout / "setup.cfg").is_file() else Path.cwd())

    @property
    def engine_venv(self) -> Path:
        """The virtual environment with vLLM."""
        return self.root / ".venv-engine"

    @property
    def engine_python(self) -> Path:
        """The interpreter of that environment."""
        return self.engine_venv / "bin" / "python"

    @property
    def models(self) -> Path:
        """One folder per model."""
        return self.root / "build" / "models"

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.root / "build" / "demo" / "logs"

    @property
    def config(self) -> Path:
        """Configuration files written for the agent and the ingress."""
        return self.root / "build" / "demo" / "config"

    @property
    def report(self) -> Path:
        """The figures of the last run."""
        return self.root / "build" / "demo" / "report.json"
