"""Watches of engines started, told and stopped in the right order."""

import asyncio

import pytest

from nearkv.agent.kubernetes.fleet import EngineFleet
from nearkv.agent.kubernetes.pod_engines import PodRules, read_engine
from nearkv.agent.kubernetes.roster import Step
from tests.agent.kubernetes.things import pod
from tests.integration.stack import eventually


def engine(**fields):
    return read_engine(pod(**fields), PodRules())


class SlowWatch:
    """A watch that takes a moment to end, and notes what happens to it."""

    def __init__(self, spec, events, fails):
        self._spec = spec
        self._events = events
        self._fails = fails

    async def run(self):
        self._note("runs")
        if self._fails:
            raise RuntimeError("a defect")
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            self._note("ended")

    async def first_look(self):
        self._note("looked")

    def admit(self, *, admitted):
        self._note(f"admitted {admitted}")

    def drain(self):
        self._note("drains")

    def _note(self, what):
        self._events.append((self._spec.url, what))


class Fleet(EngineFleet):
    """A fleet of slow watches."""

    def __init__(self, *, fails=False):
        self.events = []
        self.defects = []
        super().__init__(
            lambda spec: SlowWatch(spec, self.events, fails), on_defect=self.defects.append
        )

    def told(self, what):
        return [url for url, each in self.events if each == what]


@pytest.fixture
async def fleet():
    made = Fleet()
    yield made
    await made.close()


OLD, NEW, NEWEST = (engine(ip=f"10.0.0.{number}") for number in (7, 8, 9))


async def test_an_engine_is_out_of_the_state_before_it_comes_back_elsewhere(fleet):
    fleet.apply(Step(None, OLD))
    await eventually(lambda: fleet.told("runs"), what="it runs")
    fleet.apply(Step(OLD, NEW))
    fleet.apply(Step(NEW, NEWEST))
    await eventually(lambda: NEWEST.spec.url in fleet.told("runs"), what="the newest runs")
    order = [event for event in fleet.events if event[1] in ("runs", "ended")]
    assert order == [(OLD.spec.url, "runs"), (OLD.spec.url, "ended"), (NEWEST.spec.url, "runs")]


async def test_steps_tell_a_watch_and_leave_it_running(fleet):
    fleet.apply(Step(None, engine(ready=False)))
    fleet.apply(Step(engine(ready=False), engine()))
    fleet.apply(Step(engine(), engine(leaving=True)))
    await eventually(lambda: fleet.told("runs"), what="it runs")
    told = [what for _, what in fleet.events]
    assert told == ["admitted False", "admitted True", "admitted True", "drains", "runs"]
    await fleet.first_looks()
    fleet.apply(Step(engine(leaving=True), None))
    await eventually(lambda: fleet.told("ended"), what="it has ended")


async def test_closing_waits_until_all_have_ended():
    fleet = Fleet()
    fleet.apply(Step(None, OLD))
    await eventually(lambda: fleet.told("runs"), what="it runs")
    await fleet.close()
    assert fleet.told("ended")


async def test_a_defect_is_told():
    fleet = Fleet(fails=True)
    fleet.apply(Step(None, OLD))
    await eventually(lambda: fleet.defects, what="it is told")
    await fleet.close()
