"""Whether enough agents were heard to begin with serving (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

from nearkv.ingress.fleet import AgentView

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to be ready, why, and whether that is the last word."""

    ok: bool
    why: str = ""
    final: bool = False


@dataclass(frozen=True, slots=True)
class AgentList:
    """What is known of the list of agents; ``was_read`` is true where settings are the list."""

    was_read: bool = True
    may_be_empty: bool = True
    problem: str = ""


def judge(
    agents: Sequence[AgentView], listing: AgentList, *, engines: int, out_of_time: bool
) -> Verdict:
    """Say whether to serve.

    Agents that do not answer, and a list without agents, are waited for only so long. A list
    that was never read is waited for until there is any engine to send requests to: others may
    know some.
    """
    missing = [agent.url for agent in agents if not agent.synced]
    if listing.was_read and not missing and (agents or listing.may_be_empty):
        return Verdict(ok=True, final=True)
    if not listing.was_read:
        reason = f": {listing.problem}" if listing.problem else ""
        waiting = Verdict(ok=False, why=f"the agents were not listed yet{reason}")
        return Verdict(ok=True, why=waiting.why, final=True) if out_of_time and engines else waiting
    if out_of_time:
        why = f"serving without {len(missing)} of {len(agents)} agents" if agents else "no agents"
        return Verdict(ok=True, why=why, final=True)
    return Verdict(ok=False, why=f"waiting for {_named(missing) or 'a first agent'}")


def _named(urls: Sequence[str]) -> str:
    more = len(urls) - _MOST_NAMED
    return ", ".join(urls[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
