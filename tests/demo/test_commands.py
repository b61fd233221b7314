import sys

import pytest

from nearkv.demo.commands import CommandRunner
from nearkv.demo.errors import SetUpError


def runner(tmp_path, progress=lambda _line: None):
    return CommandRunner(
        log_path=tmp_path / "log",
        progress=progress,
        explain=lambda log: "buy a disk" if "disk full" in log else "",
    )


def python(code):
    return (sys.executable, "-c", code)


def test_output_goes_to_the_log(tmp_path):
    runner(tmp_path).run("greeting", python("print('hello')"), deadline_seconds=20)
    assert "# greeting\nhello\n" in (tmp_path / "log").read_text()


def test_failure_shows_status_log_and_advice(tmp_path):
    code = "print('disk full'); raise SystemExit(4)"
    with pytest.raises(SetUpError, match=r"(?s)failed with status 4.*disk full.*buy a disk"):
        runner(tmp_path).run("saving", python(code), deadline_seconds=20)


def test_command_is_ended_at_its_deadline(tmp_path):
    lines = []
    with pytest.raises(SetUpError, match="sleeping: took more than 0 s"):
        runner(tmp_path, lines.append).run(
            "sleeping", python("import time; time.sleep(60)"), deadline_seconds=0.1
        )
