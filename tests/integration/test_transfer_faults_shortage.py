"""Too little memory, too few descriptors, full disks: what is short costs the transfer only."""

import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL

import pytest

from tests.integration.kv_programs import (
    PATIENCE_SECONDS,
    ROOT,
    AgentProgram,
    EngineProgram,
    wait_until,
)
from tests.integration.kv_site import Site

PULL_SECONDS = 30.0


@pytest.fixture(scope="module")
def node():
    """P and D under one agent."""
    site = Site(lookup_seconds=5.0, pull_seconds=PULL_SECONDS)
    yield site
    site.close()


@contextmanager
def another_engine(site, *, within=()):
    """Run a third engine at the agent."""
    engine = EngineProgram("x", site.folder, site.d_agent.socket, within=within)
    try:
        engine.wait_started()
        yield engine
    finally:
        engine.end()


@contextmanager
def limited(pid, kind, value):
    """Limit what a process may have, for the time of the block."""
    soft, hard = resource.prlimit(pid, kind, (value, resource.prlimit(pid, kind)[1]))
    try:
        yield
    finally:
        if Path(f"/proc/{pid}").exists():
            resource.prlimit(pid, kind, (soft, hard))


def lowest_free(pid):
    """Return the number that a process's next descriptor would get."""
    taken = {int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in range(len(taken) + 1) if number not in taken)


def mapped_bytes(pid):
    """Return how much address space a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def reasons(engine, before):
    """Return what was counted at an engine since."""
    after = engine.status.tally
    return {key for key in after if after[key] != before.get(key)} - {"lookup/found"}


# -- Memory ----------------------------------------------------------------------------------


def test_an_engine_that_gets_no_shared_memory_serves_alone(node):
    """A limit on file sizes counts for memfds too, and is the way to have one fail for sure."""
    with node.case(), another_engine(node, within=("prlimit", "--fsize=65536")) as engine:
        assert engine.status.off.startswith("memory: ")
        wait_until(lambda: engine.status.registered, "its scheduler registers")
        params = node.prefill()
        outcome = engine.get("decode", tokens=node.tokens, params=params)
        assert (outcome.right, outcome.loaded) == (True, 0)
        assert reasons(engine, {}) == {"lookup/memory"}


def test_a_mover_that_cannot_map_a_source_costs_the_pull_only(node):
    with node.case():
        (mover,) = node.d_agent.movers()
        gone = node.p.status.inodes
        node.p.strike(SIGKILL)
        node.assert_let_go(gone)  # what it had mapped would make room for the next
        with limited(mover, resource.RLIMIT_AS, mapped_bytes(mover)):
            node.engines.pop("p").end()
            node.start_engine("p")
            before = node.d.status.tally
            assert not node.pull_once()
            assert reasons(node.d, before) == {"load/memory"}


# -- Descriptors -----------------------------------------------------------------------------


def test_an_agent_without_descriptors_goes_on_when_it_has_some(node):
    with node.case():
        agent = node.d_agent
        (mover,) = agent.movers()
        os.kill(mover, SIGKILL)
        wait_until(lambda: not agent.movers(), "the agent has noticed")
        before = node.d.status.tally
        with limited(agent.pid, resource.RLIMIT_NOFILE, lowest_free(agent.pid)):
            assert not node.pull_once()
            assert reasons(node.d, before) == {"load/mover_lost"}
            with another_engine(node) as engine:
                assert not engine.status.registered
                assert engine.get("decode", tokens=node.tokens, params=None).right
        assert all('"mover_not_started"' in error for error in agent.errors)
        agent.errors.clear()
        with another_engine(node) as engine:
            wait_until(lambda: engine.status.registered, "it registers")


# -- Disks -----------------------------------------------------------------------------------


def test_an_agent_whose_log_is_full_goes_on(node):
    node.end_all()
    with Path("/dev/full").open("wb") as full:
        agent = AgentProgram("n1", node.folder / "n1", log=full)
        try:
            with (
                EngineProgram("p", node.folder, agent.socket).running() as p,
                EngineProgram("d", node.folder, agent.socket).running() as d,
            ):
                params = p.get("prefill", tokens=node.tokens).params
                outcome = d.get("decode", tokens=node.tokens, params=params)
                assert (outcome.right, outcome.loaded) == (True, node.blocks)
        finally:
            agent.end()


def test_an_agent_that_can_make_no_socket_says_which(tmp_path):
    """A file system without inodes, as after a disk was filled with small files."""
    config = tmp_path / "agent.json"
    folder = tmp_path / "full"
    folder.mkdir()
    transfer = {"socket_dir": str(folder), "peer_listen": "127.0.0.1:0"}
    config.write_text(json.dumps({"listen": "127.0.0.1:0", "engines": [], "transfer": transfer}))
    script = 'mount -t tmpfs -o nr_inodes=1 nearkv "$1" || exit 99; shift; exec "$@"'
    ended = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c", script, "sh", str(folder)),
            *(sys.executable, "-m", "nearkv.agent", "--config", str(config)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    if ended.returncode in (1, 99) and "nearkv" not in ended.stderr:
        pytest.skip(f"no mounts here: {ended.stderr}")
    assert ended.returncode not in (0, 99)
    assert f"{folder}/agent.sock" in ended.stderr
    assert "No space left" in ended.stderr
    assert "Traceback" not in ended.stderr
