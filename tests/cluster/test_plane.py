"""The plane and its command, shown with stand-ins for the binaries."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nearkv.scheduler_config.linting import lint
from tests.cluster.binaries import NAMES, VARIABLE, find_binaries
from tests.cluster.plane import PlaneError, real_plane, scheduler_document
from tests.doubles.scheduler import ExtenderConfig, SchedulerConfig
from tests.doubles.scheduler.scripted_extender import ScriptedExtender
from tests.integration.scheduler_behaviours import NAMES as NODE_NAMES
from tests.integration.scheduler_behaviours import failed_filter
from tests.integration.scheduling_scenarios import near_the_kv
from tests.integration.scheduling_site import site_over

ROOT = Path(__file__).parents[2]
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture
def binaries(tmp_path):
    """Write stand-ins as programs into a folder."""
    for name in NAMES:
        program = tmp_path / name
        path = f"{ROOT}:{ROOT / 'src'}"
        program.write_text(
            f"#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} -m tests.cluster.stand_in "
            f'{name} "$@"\n'
        )
        program.chmod(0o755)
    return find_binaries({VARIABLE: str(tmp_path)})


@needs_openssl
async def test_a_scenario_runs_on_the_plane(binaries):
    async with real_plane(binaries) as plane, site_over(plane) as cluster:
        await near_the_kv(cluster)


@needs_openssl
async def test_a_behaviour_runs_on_the_plane(binaries):
    async with (
        real_plane(binaries) as plane,
        site_over(plane) as cluster,
        ScriptedExtender().serving() as extender,
    ):
        for name in NODE_NAMES:
            await cluster.add_node(name, agent=False)
        await failed_filter(cluster, extender, "500")


async def test_a_binary_that_ends_is_told_with_its_log(tmp_path):
    for name in NAMES:
        (tmp_path / name).write_text("#!/bin/sh\necho no such flag\nexit 3\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(PlaneError, match=r"etcd ended with 3:\nno such flag"):
        async with real_plane(find_binaries({VARIABLE: str(tmp_path)})):
            pass


def run_command(**environment):
    inherited = {key: value for key, value in os.environ.items() if key != VARIABLE}
    return subprocess.run(  # noqa: PLW1510 (the return code is asserted)
        [sys.executable, "-m", "tests.cluster"],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=50,
    )


def test_without_binaries_the_command_says_so_in_one_line():
    done = run_command()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert f"{VARIABLE} is not set" in done.stdout


def test_missing_binaries_are_named(tmp_path):
    done = run_command(**{VARIABLE: str(tmp_path)})
    assert done.returncode == 2
    assert "has no etcd, kube-apiserver, kube-scheduler" in done.stderr


def test_the_configuration_written_for_a_real_scheduler_is_one_it_takes(tmp_path):
    entry = ExtenderConfig(
        url_prefix="http://127.0.0.1:1/v1", prioritize_verb="prioritize", weight=3
    )
    config = SchedulerConfig(scheduler_name="llm-scheduler", extenders=[entry])
    report = lint(str(scheduler_document(config, tmp_path / "kubeconfig")))
    assert not report.has_errors
