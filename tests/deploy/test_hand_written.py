"""YAML and scripts that people wrote, through their linters; small programs of the chart."""

import http.server
import socket
import subprocess
import sys
import threading
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import CHART, DEPLOY
from tests.deploy.tools import beside_python, run

FOLDERS = ("examples", "kind", "crds", "helm/nearkv/ci", "helm/nearkv/files")
YAML = [
    *(path for folder in FOLDERS for path in sorted((DEPLOY / folder).glob("*.yaml"))),
    *(CHART / "values.yaml", CHART / "Chart.yaml", CHART.parent / "schema-rules.yaml"),
]
SCRIPTS = sorted(DEPLOY.rglob("*.sh"))


def test_yamllint_has_nothing_to_say():
    config = str(DEPLOY / ".yamllint.yaml")
    done = run(beside_python("yamllint"), "--strict", "-c", config, *map(str, YAML))
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(path):
    done = run(beside_python("shellcheck"), str(path))
    assert (done.returncode, done.stdout) == (0, "")
    assert path.stat().st_mode & 0o111


def load(name):
    """Import a file of the chart."""
    spec = spec_from_file_location(name, CHART / "files" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_agents_are_found_by_name_and_written_below_the_settings(tmp_path):
    source, target = tmp_path / "source.yaml", tmp_path / "target.yaml"
    source.write_text("listen: 0.0.0.0:8080\n")
    load("find_agents").main("localhost", 9470, source, target)
    settings = yaml.safe_load(target.read_text())
    assert settings["listen"] == "0.0.0.0:8080"
    assert "http://127.0.0.1:9470" in settings["agents"]
    assert len(set(settings["agents"])) == len(settings["agents"])


def test_addresses_of_version_6_are_put_in_brackets(monkeypatch):
    found = [(socket.AF_INET6, 0, 0, "", ("fd00::7", 9470, 0, 0))] * 2
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert load("find_agents").agent_urls("agents", 9470) == ["http://[fd00::7]:9470"]


def test_looking_for_agents_ends_without_any():
    looks = []
    find = load("find_agents").wait_for_agents
    assert find(lambda: looks.append(1) or [], wait_seconds=0.02, pause_seconds=0.005) == []
    assert len(looks) > 1
    answers = iter([[], ["http://a"]])
    assert find(lambda: next(answers), wait_seconds=60, pause_seconds=0) == ["http://a"]


class Component(http.server.BaseHTTPRequestHandler):
    """Answers as a component that wants a token for its metrics."""

    def do_GET(self):
        ok = self.path == "/readyz" or self.headers["Authorization"] == "Bearer right"
        body = b"# HELP nearkv_build_info x\nnearkv_build_info 1\n" if ok else b"no"
        self.send_response(200 if ok else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Keep quiet."""


@pytest.fixture
def component():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Component) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(url, series, token=""):
    """Run what `helm test` runs."""
    file = str(Path(CHART / "files" / "ask.py"))
    return subprocess.run(
        [sys.executable, file, url, series],
        env={"TOKEN": token},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_helm_test_passes_where_health_and_series_are_there(component):
    assert ask(component, "nearkv_build_info", "right").returncode == 0


def test_helm_test_says_which_series_is_missing(component):
    done = ask(component, "nearkv_other", "right")
    assert done.returncode == 1
    assert f"{component}/metrics has no nearkv_other" in done.stderr
