"""Three hosts on one switch; the cable of each can be made slower, both ways, at any time."""

import subprocess
from contextlib import ExitStack

HOSTS = {"n1": "10.48.0.1", "n2": "10.48.0.2", "n3": "10.48.0.3"}
US = "10.48.0.254"
"""Where the tests themselves are on the switch, with whatever is not on a host."""

_SWITCH = "nkswitch"


def run(*command: str) -> None:
    """Run a command; an error shows what it wrote."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class Network:
    """The switch, the hosts' namespaces and their cables."""

    def __init__(self, stack: ExitStack) -> None:
        run("ip", "link", "add", _SWITCH, "type", "bridge")
        stack.callback(run, "ip", "link", "delete", _SWITCH)
        run("ip", "address", "add", f"{US}/24", "dev", _SWITCH)
        run("ip", "link", "set", _SWITCH, "up")
        for host, address in HOSTS.items():
            self._add(host, address, stack)

    def within(self, host: str) -> tuple[str, ...]:
        """Return the command that runs another one on a host."""
        return ("ip", "netns", "exec", host)

    def limit(self, **mbit_per_second: int) -> None:
        """Set how much each cable lets through, both ways."""
        for host, rate in mbit_per_second.items():
            shape = ("root", "tbf", "rate", f"{rate}mbit", "burst", "64kb", "latency", "50ms")
            run("tc", "qdisc", "replace", "dev", f"{host}s", *shape)
            run(*self.within(host), "tc", "qdisc", "replace", "dev", f"{host}h", *shape)

    def _add(self, host: str, address: str, stack: ExitStack) -> None:
        run("ip", "netns", "add", host)
        stack.callback(run, "ip", "netns", "delete", host)
        run("ip", "link", "add", f"{host}s", "type", "veth", "peer", "name", f"{host}h")
        # A namespace takes its cable along only some time after it was deleted.
        stack.callback(run, "ip", "link", "delete", f"{host}s")
        run("ip", "link", "set", f"{host}s", "master", _SWITCH, "up")
        run("ip", "link", "set", f"{host}h", "netns", host)
        inside = self.within(host)
        run(*inside, "ip", "address", "add", f"{address}/24", "dev", f"{host}h")
        for device in (f"{host}h", "lo"):
            run(*inside, "ip", "link", "set", device, "up")
