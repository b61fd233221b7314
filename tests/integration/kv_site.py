"""Engines and agents on one node or two, and what must be true when nothing goes on.

A :class:`Site` is used again and again: each case begins with everything whole, and whatever a
case leaves behind fails that case.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.doubles.kv_engine import KvShape
from tests.integration.kv_programs import (
    ROOT,
    AgentProgram,
    EngineProgram,
    Gate,
    children,
    descriptors,
    holds,
    inner_pid,
    state,
    wait_until,
)

HELD_PROGRAMS = ROOT / "tests/doubles/held_programs"
GONE_SECONDS = 15.0
"""How long whoever held a dead engine's memory may take to let go of it; far less, given CPUs."""


@dataclass(frozen=True)
class Place:
    """Where a node's programs run: ``within`` and ``prepare`` (agents only) are commands."""

    within: tuple = ()
    prepare: tuple = ()
    env: dict = field(default_factory=dict)
    transfer: dict = field(default_factory=dict)


class Site:
    """Engine ``p`` and engine ``d``, on one node or on two."""

    def __init__(self, *, nodes=1, shape=None, env=None, places=None, **extra):
        self.folder = Path(tempfile.mkdtemp(prefix="nkv-", dir="/tmp"))
        self.gate_path = self.folder / "gate"
        self._shape = shape or {}
        self._extra = extra
        self._places = places or {}
        self._env = {
            "PYTHONPATH": str(HELD_PROGRAMS),
            "NEARKV_TEST_GATE": str(self.gate_path),
            **(env or {}),
        }
        self._node_of = {"p": "n1", "d": "n1" if nodes == 1 else "n2"}
        self.agents = {}
        self.engines = {}
        self._at_rest = {}
        self._is_whole = False
        self.tokens = list(range(100, 133))
        for node in set(self._node_of.values()):
            (self.folder / node).mkdir()

    @property
    def p(self):
        return self.engines["p"]

    @property
    def d(self):
        return self.engines["d"]

    @property
    def p_agent(self):
        return self.agents[self._node_of["p"]]

    @property
    def d_agent(self):
        return self.agents[self._node_of["d"]]

    @property
    def blocks(self):
        """Return how many whole blocks a prompt has."""
        return len(self.tokens) // self._shape.get("block_size", KvShape().block_size)

    @contextmanager
    def case(self):
        """Begin and end with everything whole; what went wrong does not reach the next case."""
        try:
            if not self._is_whole:
                self.make_whole()
                self._at_rest = {agent: self._descriptors(agent) for agent in self.agents.values()}
            self._is_whole = False
            yield
            self.make_whole()
            self.assert_quiet()
            self._is_whole = not set(self.agents.values()) - set(self._at_rest)
        except BaseException:
            for agent in self.agents.values():
                sys.stderr.write("\n".join(agent.log) + "\n")
            self.end_all()
            raise

    @contextmanager
    def held(self):
        """Hold movers within the block; the gate is opened with its end at the latest."""
        gate = Gate(self.gate_path)
        try:
            yield gate
        finally:
            gate.open()

    def close(self):
        self.end_all()
        shutil.rmtree(self.folder)

    def end_all(self):
        with ExitStack() as stack:
            for program in (*self.agents.values(), *self.engines.values()):
                stack.callback(program.end)
        self.agents.clear()
        self.engines.clear()
        self._is_whole = False

    def make_whole(self):
        """Continue what is stopped, start what is gone, and have one pull done."""
        for node in sorted(set(self._node_of.values())):
            if not self._goes_on(self.agents.get(node)):
                self.start_agent(node)
        for name, node in self._node_of.items():
            if not self._goes_on(self.engines.get(name)):
                self._begin_engine(name, node)
        for agent in self.agents.values():
            agent.wait_started()
        for engine in self.engines.values():
            engine.wait_registered()
        wait_until(self.pull_once, "a pull succeeds")

    def start_engine(self, name):
        """Start an engine, and wait until it has registered."""
        self._begin_engine(name, self._node_of[name])
        self.engines[name].wait_registered()

    def _begin_engine(self, name, node):
        folder = self.folder
        self.engines[name] = EngineProgram(
            name,
            folder,
            folder / node / "agent.sock",
            shape=self._shape,
            env=self._env,
            within=self._place(node).within,
            **self._extra,
        )

    def start_agent(self, node):
        place = self._place(node)
        paths = [] if len(set(self._node_of.values())) == 1 else ["tcp"]
        self.agents[node] = AgentProgram(
            node,
            self.folder / node,
            within=(*place.within, *place.prepare),
            env={**self._env, **place.env},
            **{"paths": paths, **place.transfer},
        )

    def _place(self, node):
        return self._places.get(node) or Place()

    def pull_once(self):
        """Do a prefill and a decode; tells whether the KV came by the transfer."""
        params = self.prefill()
        outcome = self.d.get("decode", tokens=self.tokens, params=params)
        assert outcome.right
        return params and outcome.loaded == self.blocks

    def prefill(self):
        return self.p.get("prefill", tokens=self.tokens).params

    def _goes_on(self, program):
        """Continue a program; False where there is none any more."""
        if program is None:
            return False
        if program.is_alive:
            os.kill(program.pid, signal.SIGCONT)
            return True
        program.end()
        return False

    # -- What must be true ---------------------------------------------------------------

    def assert_quiet(self):
        """Make sure that nothing is held, kept or left behind."""
        for agent in self.agents.values():
            count = self._descriptors(agent)
            assert count == self._at_rest.get(agent, count), "descriptors of the agent"
            assert mapped_memfds(agent.pid) == [], "the agent maps engine memory"
            assert agent.errors == []
        for engine in self.engines.values():
            wait_until(lambda engine=engine: self._is_free(engine), f"{engine.name} is at rest")
            assert engine.status.scribbled == 0, f"somebody wrote into free blocks of {engine.name}"

    def _descriptors(self, agent):
        """Return how many descriptors an agent at rest has, without two for each mover."""
        unrest = {}

        def at_rest():
            nonlocal unrest
            unrest = self._unrest(agent)
            return not unrest

        try:
            wait_until(at_rest, f"agent {agent.pid} is at rest")
        except AssertionError as error:
            error.add_note(f"it has {unrest}")
            raise
        return descriptors(agent.pid) - 2 * len(children(agent.pid))

    def _unrest(self, agent):
        """Return what an agent still has to do, or has left behind."""
        transfer = agent.transfer
        busy = {k: transfer[k] for k in ("pulls", "inflight_bytes", "readers") if transfer[k]}
        if transfer["leases"] != {"open": 0, "closing": 0}:
            busy["leases"] = transfer["leases"]
        movers = agent.movers(transfer=transfer)
        if set(map(inner_pid, children(agent.pid))) != movers:
            busy["children"] = children(agent.pid)
        return busy

    @staticmethod
    def _is_free(engine):
        status = engine.status
        return status.free == status.blocks and not status.requests

    def assert_let_go(self, inodes):
        """Make sure that soon nobody of the site holds the memory of an engine that is gone."""

        def holders():
            pids = [a.pid for a in self.agents.values() if a.is_alive and state(a.pid) != "T"]
            return [p for pid in pids for p in (pid, *children(pid)) if holds(p, inodes)]

        wait_until(lambda: not holders(), "the memory is let go", seconds=GONE_SECONDS)


def mapped_memfds(pid):
    """Return the lines about engine memory in a process's map."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if re.search("memfd:nearkv|/dev/nvidia", line)]
