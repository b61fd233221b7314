"""A request at one engine: the books that it is in, and comes out of."""

from nearkv.ingress.deciding import Decided
from nearkv.ingress.fleet import EngineView, Fleet
from nearkv.ingress.hints import PrefixHints
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.ledger import EngineLoad, Ledger
from nearkv.ingress.legs import begin_leg
from nearkv.ingress.parity import ParityCheck
from nearkv.ingress.planning import Plan
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.ingress.routing import Decision, Rung
from nearkv.ingress.suspects import Suspects
from nearkv.serving import InFlight
from nearkv.state.model import EngineInfo, EngineState

VIEW = EngineView(EngineInfo(id="e", incarnation="i", url="", state=EngineState.READY), "agent")
DECIDED = Decided(Plan(Decision("e", "why", Rung.FRESH)), VIEW, 5)


def knowledge():
    return Knowledge(
        fleet=Fleet(PrefixIndex()),
        tokens=None,
        hints=PrefixHints(),
        ledger=Ledger(),
        parity=ParityCheck(),
        suspects=Suspects(),
        in_flight=InFlight(),
    )


def test_it_is_in_the_ledger_until_it_is_closed():
    know = knowledge()
    leg = begin_leg(know, DECIDED, VIEW, tokens=100, now=0.0)
    assert know.ledger.at("e", "i") == EngineLoad(1, 95), "5 are there already"
    assert leg.reason == "why"
    leg.close()
    assert know.ledger.total_requests == 0


def test_a_trial_that_ends_without_a_verdict_makes_way_for_the_next():
    know = knowledge()
    know.suspects.failed("e", "i", 0.0)
    trial = begin_leg(know, DECIDED, VIEW, tokens=1, now=5.0)
    other = begin_leg(know, DECIDED, VIEW, tokens=1, now=5.0)
    assert know.suspects.is_suspect("e", "i", 5.0)
    other.close()
    assert know.suspects.is_suspect("e", "i", 5.0), "it was not this one's trial"
    trial.close()
    assert not know.suspects.is_suspect("e", "i", 5.0)
