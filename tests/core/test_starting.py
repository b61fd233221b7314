"""Starting a component's program: what it needs, and what it says where that is missing."""

import subprocess
import sys

import pytest


def start_without(library, component, *arguments):
    """Run a component as if a library were not installed."""
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        f"sys.argv = ['nearkv-{component}', *{arguments!r}]\n"
        f"from nearkv.{component}.__main__ import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize(("component", "library"), [("agent", "zmq"), ("ingress", "numpy")])
def test_a_missing_extra_is_named(component, library):
    done = start_without(library, component, "--listen", "127.0.0.1:0")
    assert done.returncode == 1
    assert f"pip install 'nearkv[{component}]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("component", "library"), [("agent", "zmq"), ("ingress", "numpy")])
def test_help_needs_no_extra(component, library):
    done = start_without(library, component, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: nearkv-{component}" in done.stdout
