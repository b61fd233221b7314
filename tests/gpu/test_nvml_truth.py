"""The comparison with raw calls, made on a host that exists in a JSON file only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nearkv.agent.gpu.model import Device
from tests.doubles.nvml.building import build_library, has_compiler
from tests.doubles.nvml.double import NvmlDouble
from tests.doubles.nvml.hosts import GB200_WITHOUT, consumer, eight_h100, gb200, mig_host
from tests.gpu.nvml_raw import RawAnswer
from tests.gpu.nvml_truth import ROWS, Verdict, compare

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {row.name: row for row in ROWS}

_PROGRAM = """
import sys
from pathlib import Path
from tests.gpu.nvml_truth import check_nvml
finding = check_nvml(library_dir=Path(sys.argv[1]))
print(finding.detail, dict(finding.figures))
"""


@pytest.mark.skipif(not has_compiler(), reason="no gcc here")
@pytest.mark.parametrize(
    ("host", "without"),
    [(eight_h100, ()), (mig_host, ()), (consumer, ()), (gb200, GB200_WITHOUT)],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_every_value_is_printed_with_its_raw_call(tmp_path, host, without):
    library = build_library(tmp_path / "library", without)
    double = NvmlDouble(tmp_path, library, host())
    # In a process of its own: a library that was loaded once stays, for all other tests.
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(library)],
        env={**os.environ, **double.environment, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert "'WRONG': 0.0" in done.stdout
    for row in ROWS:
        lines = [line for line in done.stdout.splitlines() if f"GPU 0 {row.name} " in line]
        assert len(lines) == 1, row.name
        assert "nvml" in lines[0]
    assert double.calls()["init"] == double.calls()["shutdown"] == 2


@pytest.mark.parametrize(
    ("name", "values", "answer", "verdict"),
    [
        ("minor", {"minor": 3}, RawAnswer("call", 0, 3), Verdict.SAME),
        ("minor", {"minor": 3}, RawAnswer("call", 0, 4), Verdict.WRONG),
        ("minor", {}, RawAnswer("call", 0, 4), Verdict.WRONG),
        ("minor", {}, RawAnswer("call", 3), Verdict.NEITHER),
        ("power_watts", {"power_watts": 70.0}, RawAnswer("call", 0, 71_000), Verdict.MOVED),
        ("power_watts", {"power_watts": 70.0}, RawAnswer("call", 0, 70_000), Verdict.SAME),
    ],
)
def test_verdicts(name, values, answer, verdict):
    assert compare(BY_NAME[name], Device(index=0, **values), answer) is verdict
