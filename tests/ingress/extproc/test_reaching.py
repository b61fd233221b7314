"""Which engines a gateway can reach: of the fleet, of the pool, of a subset."""

import pytest

from nearkv.ingress.errors import NoEngineError, UnknownModelError
from nearkv.ingress.extproc.endpoints import Membership
from nearkv.ingress.extproc.reaching import Reach
from nearkv.ingress.fleet import EngineView, Fleet
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.state.model import EngineInfo, EngineState


class Site:
    """A fleet, a pool that can be changed, and what was counted."""

    def __init__(self, *urls, pool=None, models=("tiny",)):
        self.fleet = Fleet(PrefixIndex())
        for number, url in enumerate(urls):
            info = EngineInfo(
                id=f"e{number}", incarnation="1", url=url, models=models, state=EngineState.READY
            )
            self.fleet.engines[info.id] = EngineView(info, agent="agent")
        self.pool = pool
        self.skipped = []
        self.reach = Reach(self.fleet, lambda: self.pool, self.skipped.append)

    def names(self, model="tiny", subset=None):
        return [view.info.id for view in self.reach.views(model, subset)]


URLS = ("http://10.0.0.1:8000", "http://10.0.0.2:8000")
POOL = Membership({"10.0.0.1": (8000,)}, {"10.0.0.1": "a"})


def test_without_a_pool_every_engine_with_an_address_is_reached():
    site = Site(*URLS, "http://engine-3:8000")
    assert site.names() == ["e0", "e1"]
    assert site.names() == ["e0", "e1"]
    assert site.skipped == ["no_address"]  # told once, not for each request


def test_engines_outside_of_the_pool_are_left_out_and_its_changes_count_at_once():
    site = Site(*URLS, pool=POOL)
    assert site.names() == ["e0"]
    assert site.skipped == ["not_in_pool"]
    site.pool = Membership({"10.0.0.2": (8000,)}, {"10.0.0.2": "b"})
    assert site.names() == ["e1"]
    site.pool = Membership()
    with pytest.raises(NoEngineError, match="none of the 2"):
        site.names()


def test_members_that_no_agent_knows_serve_any_model():
    pool = Membership({"10.0.0.1": (8000,), "10.0.0.9": (8000,)}, {"10.0.0.9": "new"})
    site = Site(*URLS, pool=pool)
    assert site.names() == ["e0", "new"]
    assert site.names("other") == ["new"]
    assert site.names(None) == ["e0", "new"]
    assert site.reach.at("10.0.0.9:8000").info.id == "new"
    assert site.reach.at("10.0.0.9:8000") is site.reach.at("10.0.0.9:8000")


def test_an_engine_behind_a_sidecar_is_no_stranger():
    pool = Membership({"10.0.0.1": (9000,)}, {"10.0.0.1": "a"})
    site = Site(URLS[0], pool=pool)
    assert site.names() == ["e0"]
    assert site.reach.at("10.0.0.1:9000").info.id == "e0"


def test_a_model_that_nobody_serves_is_the_clients_mistake():
    with pytest.raises(UnknownModelError, match="tiny"):
        Site(*URLS).names("other")
    with pytest.raises(NoEngineError):
        Site().names("other")


def test_a_subset_is_kept_to():
    site = Site(*URLS)
    assert site.names(subset={"10.0.0.2:8000"}) == ["e1"]
    with pytest.raises(NoEngineError, match="subset"):
        site.names(subset=frozenset())


def test_nobody_is_behind_an_endpoint_that_is_not_known():
    assert Site(*URLS).reach.at("10.9.9.9:1") is None
