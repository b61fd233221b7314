"""YAML and scripts that people wrote, through their linters; small programs of the chart."""

import http.server
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nearkv.certificates import CertificateFiles, load_context
from tests.deploy.chart import CHART, DEPLOY
from tests.deploy.tools import beside_python, run
from tests.doubles.authority import MISSING, Authority

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


def ask(url, series, token="", **environment):
    """Run what `helm test` runs."""
    file = str(Path(CHART / "files" / "ask.py"))
    return subprocess.run(
        [sys.executable, file, url, series],
        env={"TOKEN": token, **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_helm_test_passes_where_health_and_series_are_there(component):
    assert ask(component, "nearkv_build_info", "right").returncode == 0


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_helm_test_shows_a_certificate_to_agents_over_tls(tmp_path):
    ours = Authority(tmp_path, "ours")
    agent, reader = ours.issue("agent"), ours.issue("reader")
    tls = load_context(CertificateFiles(agent.cert, agent.key, ours.cert))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Component) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        files = {
            "CA_FILE": str(ours.cert),
            "CERT_FILE": str(reader.cert),
            "KEY_FILE": str(reader.key),
        }
        url = f"https://127.0.0.1:{server.server_port}"
        done = ask(url, "nearkv_build_info", "right", **files)
        server.shutdown()
    assert (done.returncode, done.stderr) == (0, "")


def test_helm_test_says_which_series_is_missing(component):
    done = ask(component, "nearkv_other", "right")
    assert done.returncode == 1
    assert f"{component}/metrics has no nearkv_other" in done.stderr
