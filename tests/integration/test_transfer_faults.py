"""Movers, agents and engines that are killed or stopped before, during and after a pull.

All are real processes; the engines' connectors are the real ones. Whatever is struck, the
request at D ends with the right KV, P gets its blocks back, nobody holds the memory of a dead
engine or writes into blocks that were freed, and once all is whole again a pull works. Most of
that is looked at by :meth:`Site.case` at the end of each case.
"""

import os
from contextlib import ExitStack
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest

from tests.integration.kv_programs import ProgramEnded, state, wait_until
from tests.integration.kv_site import Site

SHORT_SECONDS = 0.8
"""Time of pulls that are held until it has passed."""
LONG_SECONDS = 30.0
"""Time of pulls that must not end by their deadline."""
OVERDUE = {"load/deadline", "load/agent_lost"}
"""Why D took nothing by its deadline: the agent's word may come too late on a busy machine."""
WORDS = {SIGKILL: "killed", SIGSTOP: "stopped"}


@pytest.fixture(scope="module")
def node():
    """P and D under one agent."""
    site = Site(lookup_seconds=1.5, pull_seconds=LONG_SECONDS)
    yield site
    site.close()


@pytest.fixture(scope="module")
def nodes():
    """P and D on nodes of their own, and a pull that no socket buffer takes whole."""
    shape = {"layers": 2, "blocks": 24, "block_bytes": 1 << 20}
    site = Site(nodes=2, shape=shape, lookup_seconds=1.5, pull_seconds=LONG_SECONDS)
    yield site
    site.close()


class Case:
    """One request at D, and what is done to it."""

    def __init__(self, site, victim, how):
        self.site = site
        self.victim = victim
        self.how = how
        self.before = site.d.status.tally
        self.mover = None
        self.request = None
        self.params = site.prefill()
        # P tells its agent of the lease after it has answered: a P that is stopped before has none.
        wait_until(lambda: site.p_agent.transfer["leases"]["open"] == 1, "the lease is known")

    @property
    def process(self):
        """The id of the process that is struck."""
        movers = {"mover": (self.site.d_agent, "pull"), "server": (self.site.p_agent, "serve")}
        if self.victim not in movers:
            return self.program.pid
        agent, kind = movers[self.victim]
        (pid,) = agent.movers(kind)
        return pid

    @property
    def program(self):
        """The program that is struck, where it is not a mover."""
        named = {"agent": self.site.d_agent, "p_agent": self.site.p_agent}
        return named.get(self.victim) or self.site.engines[self.victim]

    def strike(self):
        """Strike, and wait for what follows of itself."""
        if self.victim in ("mover", "server"):
            strike_mover(self.process, self.how)
            if self.how == SIGKILL:
                wait_until(lambda: not self._movers(), "the agent has noticed")
            return
        dead = self.site.engines[self.victim].status.inodes if self.is_dead_engine else ()
        self.program.strike(self.how)
        if self.is_dead_engine:
            self.site.assert_let_go(dead)

    @property
    def is_dead_engine(self):
        return self.victim in ("p", "d") and self.how == SIGKILL

    def _movers(self):
        agent = self.site.d_agent if self.victim == "mover" else self.site.p_agent
        return agent.movers("pull" if self.victim == "mover" else "serve")

    def ask(self, seconds):
        """Have D serve the request."""
        self.request = self.site.d.ask(
            "decode", tokens=self.site.tokens, params=self.params, pull_seconds=seconds
        )

    def end(self):
        """Return why D took nothing, or ``done``; the KV must be right in any case."""
        outcome = self.request.result(40)
        assert outcome.right
        assert outcome.loaded in (0, self.site.blocks)
        assert outcome.late_ms < 15_000
        after = self.site.d.status.tally
        news = {key for key in after if after[key] != self.before.get(key)}
        reasons = {key for key in news if key.startswith(("load/", "lookup/"))}
        reasons -= {"lookup/found"}
        (reason,) = reasons
        assert (outcome.loaded > 0) == (reason == "load/done")
        return reason

    def dies(self):
        """Make sure that the request went with D."""
        with pytest.raises(ProgramEnded):
            self.request.result(40)

    def others_answer(self):
        """Make sure that engines that were not struck serve as if alone."""
        for name, engine in self.site.engines.items():
            if name != self.victim:
                assert engine.get("decode", tokens=[7] * 9, params=None).right

    def lease_runs_out(self):
        """Have P's time for the lease run out: it needs nobody to get its blocks back."""
        assert self.site.p.get("expire") == 1
        status = self.site.p.status
        assert status.free == status.blocks

    def lease_is_released(self):
        """Make sure that P gets its blocks back without waiting for the lease's end."""
        wait_until(lambda: self.site.p.status.free == self.site.p.status.blocks, "it is released")

    def go_on(self):
        """Continue what is stopped."""
        self.program.strike(SIGCONT)


def strike_mover(pid, how):

    os.kill(pid, how)
    if how == SIGSTOP:
        wait_until(lambda: state(pid) == "T", "the mover is stopped")


def in_words(value):
    return WORDS.get(value, str(value))


def cases(*victims, slow=()):
    """Return each victim with both ways of striking it."""
    both = [(victim, how) for victim in victims for how in (SIGKILL, SIGSTOP)]
    mark = pytest.mark.slow
    return pytest.mark.parametrize(
        ("victim", "how"),
        [pytest.param(*case, marks=mark) if case in slow else case for case in both],
        ids=in_words,
    )


SHOWN_ON_ONE_NODE = [(victim, SIGSTOP) for victim in ("mover", "agent", "d")]

# -- Before ----------------------------------------------------------------------------------


@cases("mover", "agent", "p", "d")
def test_struck_before_a_pull(node, victim, how):
    with node.case():
        case = Case(node, victim, how)
        case.strike()
        match victim, how:
            case "mover", _:
                case.ask(SHORT_SECONDS if how == SIGSTOP else LONG_SECONDS)
                assert case.end() in ({"load/done"} if how == SIGKILL else OVERDUE)
            case "agent", _:
                case.ask(LONG_SECONDS)
                lost = {"lookup/no_agent", "lookup/agent_lost"}
                assert case.end() in (lost if how == SIGKILL else {"lookup/deadline"})
                case.lease_runs_out()
            case "p", _:
                case.ask(LONG_SECONDS)
                assert case.end() == ("load/done" if how == SIGSTOP else "lookup/no_source")
            case "d", _ if how == SIGKILL:
                case.lease_runs_out()
            case "d", _:
                case.ask(LONG_SECONDS)
                case.lease_runs_out()
                case.go_on()
                assert case.end() == "lookup/expired"
        case.others_answer()


# -- During ----------------------------------------------------------------------------------


@pytest.fixture
def held():
    """Stack for gates, so that they are opened whatever happens."""
    with ExitStack() as stack:
        yield lambda site: stack.enter_context(site.held())


def caught(case, gate, seconds):
    """Begin a pull and catch it in the middle of its copy; returns the mover."""
    case.ask(seconds)
    mover = gate.next()["pid"]
    assert case.site.d.status.requests == 1
    return mover


@cases("mover", "agent", "p", "d")
def test_struck_during_a_pull(node, held, victim, how):
    with node.case():
        case = Case(node, victim, how)
        gate = held(node)
        waits = how == SIGSTOP and victim != "p"
        mover = caught(case, gate, SHORT_SECONDS if waits else LONG_SECONDS)
        case.strike()
        match victim, how:
            case "mover", _:
                assert case.end() in ({"load/mover_lost"} if how == SIGKILL else OVERDUE)
                case.lease_is_released()
            case "agent", _:
                assert case.end() == "load/agent_lost"
                wait_until(lambda: state(mover) in ("", "Z"), "the mover is dead, or will be")
                case.lease_runs_out()
            case "p", _ if how == SIGKILL:
                assert case.end() == "load/peer_lost"
            case "p", _:
                gate.open()
                assert case.end() == "load/done"
            case "d", _ if how == SIGKILL:
                case.dies()
                case.lease_is_released()
            case "d", _:
                wait_until(lambda: not node.d_agent.transfer["pulls"], "the pull has ended")
                case.go_on()
                assert case.end() in OVERDUE
        assert victim == "p" or state(mover) in ("", "Z")
        gate.open()
        case.others_answer()


@cases("mover", "server", "agent", "p_agent", "p", "d", slow=SHOWN_ON_ONE_NODE)
def test_struck_during_a_pull_from_another_node(nodes, held, victim, how):
    with nodes.case():
        case = Case(nodes, victim, how)
        gate = held(nodes)
        waits = how == SIGSTOP and victim in ("mover", "server", "agent", "d")
        caught(case, gate, SHORT_SECONDS if waits else LONG_SECONDS)
        case.strike()
        if victim not in ("mover", "agent", "d"):
            gate.open()
        match victim, how:
            case "mover", _:
                assert case.end() in ({"load/mover_lost"} if how == SIGKILL else OVERDUE)
            case "server", _:
                # Another server is started for the second try.
                assert case.end() in ({"load/done"} if how == SIGKILL else OVERDUE)
                os.kill(case.process, SIGCONT)
            case "agent", _:
                assert case.end() == "load/agent_lost"
                case.lease_runs_out()
            case "p_agent", _:
                assert case.end() == ("load/peer_lost" if how == SIGKILL else "load/done")
                case.lease_runs_out()
            case "p", _:
                lost = {"load/peer_lost", "load/no_source"}
                assert case.end() in (lost if how == SIGKILL else {"load/done"})
            case "d", _ if how == SIGKILL:
                case.dies()
                case.lease_is_released()
            case "d", _:
                wait_until(lambda: not nodes.d_agent.transfer["pulls"], "the pull has ended")
                case.go_on()
                assert case.end() in OVERDUE
        gate.open()
        case.others_answer()


def test_an_engine_that_was_stopped_through_its_pull_takes_what_came(node, held):
    with node.case():
        case = Case(node, "d", SIGSTOP)
        gate = held(node)
        caught(case, gate, LONG_SECONDS)
        case.strike()
        gate.open()
        wait_until(lambda: not node.d_agent.transfer["pulls"], "the pull has ended")
        case.go_on()
        assert case.end() == "load/done"


def test_a_request_that_is_aborted_during_its_pull_gets_no_late_writes(node, held):
    with node.case():
        case = Case(node, "d", None)
        gate = held(node)
        caught(case, gate, LONG_SECONDS)
        assert node.d.get("abort") == 1
        outcome = case.request.result(40)
        assert outcome.aborted
        gate.open()
        case.lease_is_released()


# -- After -----------------------------------------------------------------------------------


@pytest.mark.slow
@cases("mover", "agent", "p", "d")
def test_struck_after_a_pull(node, victim, how):
    with node.case():
        case = Case(node, victim, how)
        case.ask(LONG_SECONDS)
        assert case.end() == "load/done"
        case.lease_is_released()
        case.strike()
        case.others_answer()
        if (victim, how) == ("mover", SIGSTOP):
            # An idle mover that was stopped costs the next pull, and no more than that.
            next_one = Case(node, victim, how)
            next_one.ask(SHORT_SECONDS)
            assert next_one.end() in OVERDUE
