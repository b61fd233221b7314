import pytest
from typer.testing import CliRunner

from nearkv.demo.__main__ import Action, app, exit_status
from nearkv.demo.showing import Outcome
from nearkv.demo.workspace import Workspace


@pytest.mark.parametrize(
    ("outcome", "action", "status"),
    [
        (Outcome({}, passed=True), Action.DEMO, 0),
        (Outcome({}, passed=False), Action.DEMO, 1),
        (None, Action.DEMO, 130),
        (None, Action.RUN, 0),
    ],
    ids=["passed", "failed", "interrupted-demo", "interrupted-run"],
)
def test_exit_status(outcome, action, status):
    assert exit_status(outcome, action) == status


@pytest.mark.parametrize(
    "arguments",
    [("fly",), ("demo", "--engine", "steam"), ("demo", "--rounds", "1"), ("demo", "--port", "0")],
    ids=["action", "engine", "rounds", "port"],
)
def test_wrong_usage_is_refused(arguments):
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.timeout(10)
def test_wrong_model_is_refused_before_anything_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(Workspace, "default", classmethod(lambda cls: cls(tmp_path)))
    assert CliRunner().invoke(app, ("demo", "--model", str(tmp_path / "nowhere"))).exit_code == 1
    assert not Workspace(tmp_path).engine_venv.exists()
