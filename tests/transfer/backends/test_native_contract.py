"""The contract suite for UCX and NIXL, each in a process of its own.

Their two UCX libraries must not meet, and a crash of one must not take other tests along.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.transfer.backends.kinds import NATIVE, NATIVE_KINDS

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
PROGRAM = """\
import os, sys, pytest
status = pytest.main(sys.argv[1:])
sys.stdout.flush()
os._exit(status)  # as movers end: these libraries may crash when an interpreter is taken down
"""
SUITES = (
    "test_contract.py",
    "test_served.py",
    "test_pull_property.py",
    "test_native_faults.py",
)


@pytest.mark.skipif(NATIVE is not None, reason="this is the process of its own")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transports", [pytest.param("all", marks=pytest.mark.slow), "tcp"])
@pytest.mark.parametrize("name", sorted(NATIVE_KINDS))
def test_a_native_transport_keeps_the_contract(name, transports):
    reason = NATIVE_KINDS[name].missing()
    if reason:
        pytest.skip(reason)
    command = [sys.executable, "-c", PROGRAM, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(str(FOLDER / suite) for suite in SUITES)],
        env={
            **os.environ,
            "NEARKV_TEST_NATIVE": name,
            "UCX_NET_DEVICES": "lo",
            "UCX_TLS": transports,
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
