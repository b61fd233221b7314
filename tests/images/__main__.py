"""``make test-images``: build and run all images, or say why that cannot be done here."""

import os
import subprocess
import sys
from pathlib import Path

from tests.images.building import WANTED, why_not


def main() -> int:
    """Return the exit status: 0 where nothing can be built."""
    reason = why_not()
    if reason:
        sys.stdout.write(f"test-images was skipped: {reason}\n")
        return 0
    tests = (sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", *sys.argv[1:])
    environment = {**os.environ, WANTED: "1"}
    command = [*tests, str(Path(__file__).parent)]
    return subprocess.run(command, check=False, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
