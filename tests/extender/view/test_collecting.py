"""Collecting from real HTTP agents: the good, the gone, the late, the mad, and thousands."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from nearkv.certificates import (
    CertificateFiles,
    ClientCertificates,
    ClientFiles,
    load_context,
)
from nearkv.extender.view.collecting import AgentTarget, AgentTrust, SummaryCollector
from nearkv.extender.view.polling import CollectLimits
from nearkv.extender.view.state import ClusterState
from nearkv.serving import Transport
from tests.extender.tls_files import HAS_OPENSSL, make_pair
from tests.extender.view.agents import HUNDRED_MB, PLAIN, serving_agents
from tests.extender.view.test_state import Told
from tests.extender.view.things import LEVELS
from tests.integration.stack import eventually

FAST = {
    "least_pause_seconds": 0.01,
    "first_pause_seconds": 0.02,
    "longest_pause_seconds": 0.1,
    "answer_seconds": 2.0,
}


class Collecting:
    """A collector at work, and the state that it fills."""

    def __init__(self, agents, **options):
        limits = CollectLimits(**{**FAST, **options.pop("limits", {})})
        self.agents = agents
        self.state = ClusterState(LEVELS, Told())
        self.collector = SummaryCollector(self.state, limits=limits, **options)

    def follow(self, *nodes, speaks_for=None):
        self.collector.set_targets(
            AgentTarget(self.agents.url(node), node if speaks_for is None else speaks_for)
            for node in nodes
        )

    def report(self, node="n1"):
        return self.state.summaries.get(node)

    async def heard(self, node="n1", seq=1, boot="b"):
        def is_heard():
            found = self.report(node)
            return found and (found.summary.seq, found.summary.boot) == (seq, boot)

        await eventually(is_heard, what=f"{node} is heard with {boot}:{seq}")
        return self.report(node)

    async def failed(self, reason, times=1):
        await eventually(
            lambda: self.collector.failures[reason] >= times,
            what=f"{reason} among {self.collector.failures}",
        )


@asynccontextmanager
async def collecting(transport=PLAIN, **options):
    async with serving_agents(transport) as agents:
        made = Collecting(agents, **options)
        task = asyncio.create_task(made.collector.run())
        try:
            yield made, agents
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_report_is_fetched_and_the_next_is_waited_for():
    async with collecting() as (at_work, agents):
        agent = agents.add("n1")
        at_work.follow("n1")
        found = await at_work.heard()
        assert (found.source, found.live, found.promised_seconds) == (agents.url("n1"), True, 30.0)
        await eventually(lambda: agent.waiting, what="it is waited for")
        assert "after" not in agent.queries[0]
        assert agent.queries[1]["after"] == "b:1"
        assert 24.0 <= float(agent.queries[1]["wait_seconds"]) <= 30.0
        agent.change()
        await at_work.heard(seq=2)
        assert at_work.collector.failures == {}
        assert "Connection" not in agent.headers[1]


async def test_the_token_is_shown_to_agents():
    trust = AgentTrust(token="s3cret")  # noqa: S106 (no secret)
    async with collecting(trust=trust) as (at_work, agents):
        agent = agents.add("n1")
        at_work.follow("n1")
        await at_work.heard()
        assert agent.headers[0]["Authorization"] == "Bearer s3cret"
        assert agent.headers[0]["Accept-Encoding"] == "identity"


@pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl program")
@pytest.mark.parametrize(
    ("is_trusted", "name", "reason"),
    [(True, "", ""), (False, "", "tls_untrusted"), (True, "elsewhere", "tls_other_name")],
    ids=["its-ca", "another-ca", "another-name"],
)
async def test_agents_over_tls_are_known_by_their_ca_and_name(tmp_path, is_trusted, name, reason):
    pair, other = make_pair(tmp_path, "agents"), make_pair(tmp_path, "other")
    files = ClientFiles((pair if is_trusted else other).cert, name=name)
    trust = AgentTrust(certificates=ClientCertificates(files))
    serving = Transport(tls=load_context(CertificateFiles(pair.cert, pair.key)))
    async with collecting(transport=serving, trust=trust) as (at_work, agents):
        agents.add("n1")
        at_work.follow("n1")
        await (at_work.failed(reason, times=2) if reason else at_work.heard())
        assert (at_work.report() is None) == bool(reason)


async def test_no_news_keeps_a_report_fresh():
    async with collecting(limits={"wait_seconds": 0.05}) as (at_work, agents):
        agent = agents.add("n1")
        at_work.follow("n1")
        first = (await at_work.heard()).received_at
        await eventually(lambda: at_work.report().received_at > first, what="it is fresher")
        assert agent.queries[1]["after"] == "b:1"
        assert at_work.report().summary.seq == 1


async def test_an_agent_that_breaks_off_is_lost_at_once_and_taken_up_again():
    async with collecting(limits={"first_pause_seconds": 0.3}) as (at_work, agents):
        agent = agents.add("n1")
        at_work.follow("n1")
        await at_work.heard()
        await eventually(lambda: agent.waiting, what="it is waited for")
        agent.trouble = "breaks"
        agent.tell()
        await at_work.failed("disconnected")
        assert (at_work.report().live, at_work.report().promised_seconds) == (False, 5.0)
        assert at_work.collector.agents_failing == 1
        agent.trouble = ""
        await eventually(lambda: at_work.report().live, what="it is live again")
        assert at_work.report().summary.seq == 1


async def test_an_agent_that_comes_back_with_a_new_boot_starts_over():
    async with collecting() as (at_work, agents):
        agent = agents.add("n1", seq=500)
        at_work.follow("n1")
        await at_work.heard(seq=500)
        agent.change(boot="c", seq=1)
        await at_work.heard(seq=1, boot="c")
        assert at_work.collector.failures == {}


async def test_a_sequence_that_falls_is_counted_and_does_not_count():
    async with collecting() as (at_work, agents):
        agent = agents.add("n1", seq=5)
        at_work.follow("n1")
        await at_work.heard(seq=5)
        agent.change(seq=3, rdma=True)
        await at_work.failed("older", times=2)
        assert (at_work.report().summary.seq, at_work.report().summary.rdma) == (5, None)
        agent.change(seq=6)
        await at_work.heard(seq=6)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("garbage", "garbage"),
        ("zipped", "garbage"),
        ("huge", "too_large"),
        ("hangs", "silent"),
        ("breaks", "disconnected"),
        ("not modified", "refused"),
        ("redirects", "refused"),
        ("401", "unauthorized"),
        ("404", "refused"),
        ("500", "refused"),
        ("204", "refused"),
    ],
)
async def test_a_bad_agent_is_counted_and_disturbs_no_other(trouble, reason):
    # Only who is to be given up gets little time: a busy machine may be late with the others.
    seconds = 0.3 if reason == "silent" else 10
    limits = {"answer_seconds": seconds, "connect_seconds": seconds}
    async with collecting(limits=limits) as (at_work, agents):
        bad, good = agents.add("n1"), agents.add("n2")
        bad.trouble = trouble
        at_work.follow("n1", "n2")
        await at_work.failed(reason, times=2)
        assert at_work.report("n1") is None
        good.change()
        await at_work.heard("n2", seq=2)
        assert set(at_work.collector.failures) == {reason}
        bad.trouble = ""
        await at_work.heard("n1")


async def test_a_huge_answer_is_cut_off_early():
    async with collecting() as (at_work, agents):
        agents.add("n1").trouble = "huge"
        at_work.follow("n1")
        await at_work.failed("too_large")
        assert agents.by_node["n1"].sent_bytes < HUNDRED_MB / 4


async def test_nobody_there_is_a_failure_with_growing_pauses():
    async with collecting() as (at_work, _agents):
        at_work.collector.set_targets([AgentTarget("http://127.0.0.1:1", "n1")])
        await at_work.failed("disconnected", times=3)


async def test_an_agent_cannot_speak_for_another_node():
    async with collecting() as (at_work, agents):
        agents.add("n1")
        at_work.follow("n1", speaks_for="n2")
        await at_work.failed("wrong_node")
        assert len(at_work.state.summaries) == 0


async def test_a_configured_agent_speaks_for_the_node_it_names():
    async with collecting() as (at_work, agents):
        agents.add("n1")
        at_work.follow("n1", speaks_for="")
        await at_work.heard("n1")


async def test_an_agent_that_says_no_news_all_the_time_is_not_asked_all_the_time():
    async with collecting(limits={"least_pause_seconds": 0.2}) as (at_work, agents):
        agent, clock = agents.add("n1"), agents.add("n2")
        at_work.follow("n1", "n2")
        await at_work.heard()
        agent.trouble = "not modified"
        agent.tell()
        for seq in range(2, 5):
            clock.change()
            await at_work.heard("n2", seq=seq)
        # The other one has had three times its shortest pause.
        assert len(agent.queries) <= 8


async def test_an_agent_that_is_not_wanted_any_more_is_let_go():
    async with collecting() as (at_work, agents):
        agents.add("n1")
        agents.add("n2")
        at_work.follow("n1", "n2")
        await at_work.heard("n1")
        await at_work.heard("n2")
        at_work.follow("n2")
        await eventually(lambda: not at_work.report("n1").live, what="the first is let go")
        assert at_work.report("n2").live
        asked = len(agents.by_node["n1"].queries)
        agents.by_node["n2"].change()
        await at_work.heard("n2", seq=2)
        assert len(agents.by_node["n1"].queries) == asked


async def test_an_agents_successor_at_another_address_is_taken_up():
    async with collecting() as (at_work, agents):
        agents.add("n1")
        agents.by_node["new"] = agents.add("n1", boot="c")
        agents.add("n1")
        at_work.follow("n1")
        await at_work.heard()
        at_work.collector.set_targets([AgentTarget(agents.url("new"), "n1")])
        await at_work.heard(boot="c")


async def test_a_report_that_was_forgotten_is_fetched_in_full_again():
    async with collecting(limits={"wait_seconds": 0.05}) as (at_work, agents):
        agents.add("n1")
        at_work.follow("n1")
        await at_work.heard()
        at_work.state.summaries.drop("n1")
        await at_work.heard()


async def test_a_defect_with_one_agent_does_not_end_the_others():
    async with collecting() as (at_work, agents):
        agents.add("n1")
        agents.add("n2")
        real = at_work.state.report_arrived

        def faulty(report):
            if report.summary.node == "n1":
                raise KeyError("a defect")
            real(report)

        at_work.state.report_arrived = faulty
        at_work.follow("n1", "n2")
        await at_work.failed("defect", times=2)
        agents.by_node["n2"].change()
        await at_work.heard("n2", seq=2)


async def test_more_agents_than_connections_take_turns():
    limits = {"max_connections": 4, "fetching": 4, "wait_seconds": 0.2, "polls_per_second": 1e6}
    async with collecting(limits=limits) as (at_work, agents):
        nodes = [f"n{number}" for number in range(20)]
        for node in nodes:
            agents.add(node)
        at_work.follow(*nodes)
        most = 0
        for node in nodes:
            await at_work.heard(node)
            agents.by_node[node].change()

        def all_heard():
            nonlocal most
            most = max(most, at_work.collector.in_flight)
            return all(at_work.report(node).summary.seq == 2 for node in nodes)

        await eventually(all_heard, what="all are heard again")
        assert most <= 8
        assert at_work.collector.failures == {}
        # Else each agent's connection would be kept until its next turn.
        asked = [each for agent in agents.by_node.values() for each in agent.headers]
        assert {each.get("Connection") for each in asked} == {"close"}


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_five_thousand_agents_are_heard_over_a_bounded_number_of_connections():
    limits = {"max_connections": 128, "fetching": 64, "connect_seconds": 30.0}
    async with collecting(limits={**limits, "answer_seconds": 30.0}) as (at_work, agents):
        nodes = [f"n{number}" for number in range(5000)]
        for node in nodes:
            agents.add(node)
        for node in nodes[::50]:
            agents.by_node[node].trouble = "garbage"
        at_work.follow(*nodes)
        most = 0

        def all_heard():
            nonlocal most
            most = max(most, at_work.collector.in_flight)
            return len(at_work.state.summaries) == 4900

        await eventually(all_heard, what="all good ones are heard", seconds=100)
        assert most <= 128 + 64
        assert set(at_work.collector.failures) == {"garbage"}
