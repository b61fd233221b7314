"""The library in a test: what it is told, and what it noted."""

import copy
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.doubles.nvml.hosts import Host


class NvmlDouble:
    """One host's NVML, described in a folder of its own; ``library_dir`` has the library.

    A process sees it with :attr:`environment`.
    """

    def __init__(self, folder: Path, library_dir: Path, host: Host) -> None:
        self.folder = folder
        self.library_dir = library_dir
        self.host = copy.deepcopy(host)
        self._write()

    @property
    def environment(self) -> dict[str, str]:
        """What a process that is to see this host needs."""
        return {
            "NVML_DOUBLE": str(self.folder / "host.json"),
            "LD_LIBRARY_PATH": str(self.library_dir),
        }

    def change(self, change: Callable[[Host], Any]) -> None:
        """Change the host under the feet of whoever has it open."""
        change(self.host)
        self._write()

    def raise_xid(self, index: int, xid: int) -> None:
        """Report an error of a device."""
        xids = self.host.setdefault("xids", [])
        self.change(lambda _: xids.append({"id": len(xids) + 1, "device": index, "xid": xid}))

    def calls(self) -> Counter[str]:
        """Return how often NVML was opened (``init``) and closed (``shutdown``)."""
        log = self.folder / "nvml.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return Counter(line.split()[1] for line in lines)

    def files_held_by(self, pid: int) -> list[str]:
        """Return the driver's files that a process holds open."""
        found = []
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = Path(fd.readlink())
            except FileNotFoundError:  # closed meanwhile
                continue
            if target.parent == self.folder and target.name.startswith("nvidia"):
                found.append(target.name)
        return sorted(found)

    def holders(self) -> list[int]:
        """Return the processes that hold any of the driver's files open."""
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.files_held_by(int(process.name)):
                    pids.append(int(process.name))
            except OSError:  # not ours, or gone
                continue
        return pids

    def _write(self) -> None:
        path = self.folder / "host.json"
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(self.host))
        fresh.rename(path)  # whole, or not at all
