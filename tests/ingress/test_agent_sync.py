"""When an ingress begins to serve: with all agents, or after a while without some."""

import pytest

from nearkv.ingress.agent_sync import AgentList, Verdict, judge
from nearkv.ingress.fleet import AgentView

UNREAD = AgentList(was_read=False, may_be_empty=False, problem="no connection")
WATCHED = AgentList(may_be_empty=False)
SYNCED, SILENT = AgentView("http://a", synced=True), AgentView("http://b")


@pytest.mark.parametrize(
    ("agents", "listing", "engines", "late", "verdict"),
    [
        ([], AgentList(), 0, False, Verdict(ok=True, final=True)),
        ([SYNCED], AgentList(), 1, False, Verdict(ok=True, final=True)),
        ([SYNCED, SILENT], WATCHED, 1, False, Verdict(ok=False, why="waiting for http://b")),
        (
            [SYNCED, SILENT],
            WATCHED,
            1,
            True,
            Verdict(ok=True, why="serving without 1 of 2 agents", final=True),
        ),
        ([], WATCHED, 0, False, Verdict(ok=False, why="waiting for a first agent")),
        ([], WATCHED, 0, True, Verdict(ok=True, why="no agents", final=True)),
    ],
    ids=["nobody-to-wait-for", "all", "one-silent", "given-up", "empty-yet", "empty"],
)
def test_who_answers_counts_for_a_while(agents, listing, engines, late, verdict):
    assert judge(agents, listing, engines=engines, out_of_time=late) == verdict


@pytest.mark.parametrize(
    ("engines", "late", "is_final"), [(0, False, False), (0, True, False), (2, True, True)]
)
def test_a_list_never_read_is_waited_for_until_there_is_an_engine(engines, late, is_final):
    verdict = judge([], UNREAD, engines=engines, out_of_time=late)
    assert (verdict.ok, verdict.final) == (is_final, is_final)
    assert verdict.why == "the agents were not listed yet: no connection"


def test_configured_agents_do_not_stand_for_the_list():
    assert not judge([SYNCED], UNREAD, engines=1, out_of_time=False).ok


def test_of_many_agents_a_few_are_named():
    agents = [AgentView(f"http://{index}") for index in range(12)]
    why = judge(agents, WATCHED, engines=0, out_of_time=False).why
    assert why.endswith("http://4 and 7 more")
