"""Every part of a small nearkv killed, stopped and slowed at random, under load that checks.

Two ingress replicas, two agents and four engine doubles as processes. ``SECONDS`` says how long
(600), ``SEED`` which run (1); a tenth more is for killing the two whose memory was followed until
then. What went wrong is printed, and kept with the logs.
"""

import asyncio
import os
import shutil
import sys
from pathlib import Path
from tempfile import mkdtemp

from tests.benchmarks.chaos.running import chaos
from tests.benchmarks.reporting import report

_KEPT = Path(__file__).resolve().parents[2] / "build" / "bench" / "chaos-logs"


def main() -> int:
    """Run, report, and keep the logs where something went wrong."""
    seconds, seed = float(os.environ.get("SECONDS", "600")), int(os.environ.get("SEED", "1"))
    folder = Path(mkdtemp(prefix="nearkv-chaos-"))
    figures, details = asyncio.run(chaos(folder, seconds=seconds, seed=seed))
    if details:
        sys.stdout.write("\n".join(details) + f"\nlogs: {_KEPT}\n")
        shutil.rmtree(_KEPT, ignore_errors=True)
        shutil.copytree(folder, _KEPT)
    shutil.rmtree(folder)
    return report("chaos", figures, {})


if __name__ == "__main__":
    sys.exit(main())
