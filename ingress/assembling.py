"""Putting together what sends requests to engines and copes with their failures."""

import random
import time
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from nearkv.ingress.breaker_metrics import BreakerCollector
from nearkv.ingress.deciding import Decider
from nearkv.ingress.forwarding import Forwarder
from nearkv.ingress.hedging import Hedger
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.learning import Learner
from nearkv.ingress.lease_releasing import LeaseReleaser
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.opening import Opener
from nearkv.ingress.parity_watch import ParityWatch
from nearkv.ingress.patience import Patience
from nearkv.ingress.retry_budget import RetryBudget
from nearkv.ingress.retrying import Retrying
from nearkv.ingress.settings import IngressSettings
from nearkv.ingress.suspects import Suspects
from nearkv.ingress.two_legs import TwoLegs

_JITTER = (0.8, 1.25)


def open_suspects(settings: IngressSettings) -> Suspects:
    """Return the circuit breakers of a replica; pauses are stretched by up to a quarter."""
    return Suspects(
        settings.breaker.rules,
        jitter=lambda: random.uniform(*_JITTER),  # noqa: S311 (jitter)
    )


@dataclass(frozen=True, slots=True)
class Sending:
    """The collaborators that send requests."""

    decider: Decider
    learner: Learner
    retrying: Retrying
    patience: Patience
    opener: Opener


def open_sending(
    settings: IngressSettings,
    knowledge: Knowledge,
    metrics: IngressMetrics,
    registry: CollectorRegistry,
    *,
    forwarder: Forwarder,
    releaser: LeaseReleaser,
) -> Sending:
    """Return them for one replica."""
    now = time.monotonic
    registry.register(BreakerCollector(knowledge.fleet, knowledge.suspects, now))
    decider = Decider(settings, knowledge, metrics, now)
    learner = Learner(knowledge, metrics)
    retrying = Retrying(
        suspects=knowledge.suspects,
        budget=RetryBudget(settings.retry.budget),
        metrics=metrics,
        retries=settings.retries,
        pause_seconds=settings.retry.pause_seconds,
        now=now,
        draw=random.random,
    )
    patience = Patience(settings.deadlines.patience, knowledge.fleet, knowledge.suspects, now)
    two_legs = TwoLegs(
        forwarder=forwarder,
        knowledge=knowledge,
        metrics=metrics,
        parity=ParityWatch(knowledge.parity, metrics, knowledge.guesses),
        releaser=releaser,
        retrying=retrying,
        patience=patience,
        prefill_seconds=settings.pd.prefill_seconds,
        now=now,
    )
    opener = Opener(
        knowledge=knowledge,
        forwarder=forwarder,
        two_legs=two_legs,
        decider=decider,
        learner=learner,
        retrying=retrying,
        patience=patience,
        hedger=Hedger(settings.hedge, metrics, now),
        now=now,
    )
    return Sending(decider, learner, retrying, patience, opener)
