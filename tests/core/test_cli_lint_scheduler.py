"""``nearkv lint-scheduler`` as its users run it."""

import json

import yaml

from tests.core.running_cli import run_cli
from tests.core.test_scheduler_config_rules import SOUND, entry


async def test_a_sound_file_exits_0_and_says_what_would_happen(tmp_path):
    file = tmp_path / "scheduler.yaml"
    file.write_text(yaml.safe_dump(SOUND))
    status, out, err = await run_cli("lint-scheduler", str(file))
    assert (status, err) == (0, "")
    assert "kube-scheduler would take it" in out
    assert "POST https://nearkv-extender" in out


async def test_errors_exit_1_with_line_and_fix(tmp_path):
    file = tmp_path / "scheduler.yaml"
    file.write_text(yaml.safe_dump(entry(weight=0)))
    status, out, _ = await run_cli("lint-scheduler", str(file))
    assert status == 1
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "weight" in text)
    assert f"{file}:{line}: error: extenders[0].weight" in out
    assert "fix: write weight: 8" in out
    assert "\x1b" not in out


async def test_json(tmp_path):
    file = tmp_path / "scheduler.yaml"
    file.write_text(yaml.safe_dump(entry(ignorable=False)))
    status, out, _ = await run_cli("lint-scheduler", str(file), "-o", "json")
    document = json.loads(out)
    assert (status, document["ok"]) == (0, True)
    (finding,) = document["findings"]
    assert finding["severity"] == "warning"
    assert finding["where"] == "extenders[0].ignorable"


async def test_a_file_that_cannot_be_read_exits_2(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, why in (("none", "cannot read"), ("binary", "not UTF-8"), (".", "cannot read")):
        status, _, err = await run_cli("lint-scheduler", str(tmp_path / name))
        assert status == 2
        assert why in err
