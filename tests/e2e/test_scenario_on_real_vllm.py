"""The demonstration on real vLLM with the tiny model, as `make demo` runs it."""

import json
import os
import subprocess
import sys

import pytest

from nearkv.demo.workspace import Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_the_demo_reaches_its_reduction_and_follow_ups_stay_on_the_holder():
    workspace = Workspace.default()
    done = subprocess.run(
        [sys.executable, "-m", "nearkv.demo", "demo", "--model", "tiny", "-o", "json"],
        cwd=workspace.root,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads((workspace.root / "build" / "demo" / "report.json").read_text())
    print(json.dumps(report)[:3000])  # noqa: T201 (figures for the log)
