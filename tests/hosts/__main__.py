"""``make test-hosts``: run the tests in a network of their own, or say that there is none."""

import os
import subprocess
import sys
from pathlib import Path

from tests.hosts.permission import INSIDE, why_not

_IN_A_NETWORK = (
    *("unshare", "--net", "--mount", "--propagation", "private", "--"),
    *("sh", "-c"),
    # Names of namespaces then end with this one, whatever happens.
    'mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns && ip link set lo up && exec "$@"',
    "sh",
)


def main() -> int:
    """Return the exit status: 0 where nothing can be run."""
    reason = why_not()
    if reason:
        sys.stdout.write(f"test-hosts was skipped: {reason}\n")
        return 0
    tests = (sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", *sys.argv[1:])
    command = [*_IN_A_NETWORK, *tests, str(Path(__file__).parent)]
    return subprocess.run(command, check=False, env={**os.environ, INSIDE: "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
