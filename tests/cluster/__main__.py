"""``make test-cluster``: run the scenarios on real binaries, or say that there are none."""

import sys
from pathlib import Path

import pytest

from tests.cluster.binaries import NAMES, VARIABLE, find_binaries

_USAGE_STATUS = 2


def main() -> int:
    """Return the exit status: 0 without binaries, 2 with some of them only."""
    binaries = find_binaries()
    if binaries.folder is None:
        sys.stdout.write(
            f"{VARIABLE} is not set (a folder with {', '.join(NAMES)}): nothing was run on a real "
            "cluster; make test runs the same scenarios on doubles\n"
        )
        return 0
    if binaries.missing:
        missing = ", ".join(binaries.missing)
        sys.stderr.write(f"{VARIABLE}: {binaries.folder} has no {missing} that can be run\n")
        return _USAGE_STATUS
    tests = Path(__file__).parents[1]
    chosen = [
        tests / "cluster",
        tests / "agent" / "worker_status" / "test_on_a_real_api_server.py",
    ]
    return int(pytest.main(["-q", "-p", "no:randomly", *map(str, chosen)]))


if __name__ == "__main__":
    sys.exit(main())
