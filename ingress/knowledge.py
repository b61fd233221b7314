"""What a replica knows, shared by all its requests."""

import time
from dataclasses import dataclass, field

from nearkv.block_keys import KeyNamespace, root_key
from nearkv.ingress.backlog import Backlog
from nearkv.ingress.fleet import Fleet
from nearkv.ingress.hints import PrefixHints
from nearkv.ingress.ledger import Ledger, TokenTally
from nearkv.ingress.parity import ParityCheck
from nearkv.ingress.placements import Placements
from nearkv.ingress.prefill_fit import PrefillFits
from nearkv.ingress.response_owners import ResponseOwners
from nearkv.ingress.suspects import Suspects
from nearkv.ingress.tokens.service import TokenService
from nearkv.serving import InFlight

_ADAPTER_BYTES = 4 << 20


@dataclass(slots=True)
class Totals:
    """Running totals since the start, for the status."""

    requests: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Collaborators that requests share.

    ``computing`` counts prompt tokens sent to be computed and not answered yet (under policy
    ``cost``, and where the KV of a model's engines can move), ``staged`` the KV promised to
    pairs whose decode engine has not answered yet. ``fits`` are engines' prefill times,
    ``placements`` what this replica gave them lately. ``guesses`` compares what was predicted
    from tokens that are a guess, by kind of guess; ``owners`` says who made which response,
    ``adapter_homes`` who served which adapter last.
    """

    fleet: Fleet
    tokens: TokenService
    hints: PrefixHints
    ledger: Ledger
    parity: ParityCheck
    suspects: Suspects
    in_flight: InFlight
    secret: bytes = b""
    totals: Totals = field(default_factory=Totals)
    computing: Backlog = field(default_factory=lambda: Backlog(time.monotonic))
    staged: TokenTally = field(default_factory=TokenTally)
    fits: PrefillFits = field(default_factory=PrefillFits)
    placements: Placements = field(default_factory=Placements)
    guesses: ParityCheck = field(default_factory=ParityCheck)
    owners: ResponseOwners = field(default_factory=ResponseOwners)
    adapter_homes: PrefixHints = field(
        default_factory=lambda: PrefixHints(limit_bytes=_ADAPTER_BYTES)
    )

    def key_mismatches(self) -> list[str]:
        """Return the engines whose block keys are made with another cluster secret than ours."""
        return [
            view.info.id
            for view in self.fleet.engines.values()
            if view.info.key_check
            and view.info.key_check != root_key(KeyNamespace(view.info.key_model), self.secret)
        ]

    def forget_the_gone(self) -> None:
        """Drop what was learnt of engines and incarnations that no longer exist."""
        known = {(v.info.id, v.info.incarnation) for v in self.fleet.engines.values()}
        self.parity.forget(known)
        self.suspects.forget(known)
        self.tokens.forget(known)
        self.placements.forget(known)
        self.fits.forget({engine for engine, _ in known})
