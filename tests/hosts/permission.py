"""Whether this machine lets us have network namespaces with rate limits."""

import os
import shutil
import subprocess

INSIDE = "NEARKV_TEST_HOSTS"
"""Set where the tests run in a network of their own already."""

_TRIAL = (
    "mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns && ip netns add trial && "
    "ip link add v0 type veth peer name v1 && ip link add b0 type bridge && "
    "tc qdisc add dev v0 root tbf rate 1mbit burst 64kb latency 50ms"
)


def why_not() -> str:
    """Return what is missing; empty where all is there."""
    if os.environ.get(INSIDE):
        return ""
    if not all(map(shutil.which, ("unshare", "ip", "tc"))):
        return "it needs unshare, ip and tc"
    trial = ["unshare", "--net", "--mount", "--propagation", "private", "--", "sh", "-c", _TRIAL]
    found = subprocess.run(trial, check=False, capture_output=True, text=True, timeout=20)
    if found.returncode == 0:
        return ""
    lines = found.stderr.strip().splitlines() or [f"status {found.returncode}"]
    return f"no network namespaces with rate limits here ({lines[-1]})"
