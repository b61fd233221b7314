"""Programs that some tests need, and why one is not there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.chart import ROOT

_PROMTOOL = ROOT / "build" / "tools" / "usr" / "bin" / "promtool"


def find_promtool() -> str | None:
    """Return promtool, ``None`` where it is not there."""
    found = os.environ.get("PROMTOOL") or shutil.which("promtool") or str(_PROMTOOL)
    return found if os.access(found, os.X_OK) else None


def promtool() -> str:
    """Return promtool; skips the test where it is not there."""
    found = find_promtool()
    if found is None:
        pytest.skip(
            "promtool is not here: `make promtool` gets it from Debian's prometheus package"
        )
    return found


def kubectl() -> str:
    """Return kubectl; skips the test where it is not there."""
    found = shutil.which("kubectl")
    if found is None:
        pytest.skip(
            "kubectl is not here: no PyPI or Debian 12 package has it, the machine's image does"
        )
    return found


def beside_python(name: str) -> str:
    """Return a program that a package of the dev extra has installed."""
    return str(Path(sys.executable).parent / name)


def run(*command: str, cwd: Path = ROOT, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program; the caller looks at how it ended."""
    return subprocess.run(
        command, cwd=cwd, input=stdin, capture_output=True, text=True, timeout=50, check=False
    )
