"""One chaos run: load, troubles, then calm, and the figures."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.chaos.clients import Clients, Verdicts, prepare_questions
from tests.benchmarks.chaos.plan import Harm, Plan, Victim
from tests.benchmarks.chaos.site import Site, running_site
from tests.benchmarks.reporting import percentile

_CLIENTS = 8
_CALM_SECONDS = 4.0
_SAMPLE_SECONDS = 1.0
_FINALE_RATIO = 0.1
"""So much longer it goes on once memory was followed: those spared until then are killed, too."""

Harms = Counter[tuple[str, Harm]]


async def chaos(folder: Path, *, seconds: float, seed: int) -> tuple[dict[str, float], list[str]]:
    """Return the figures of a run, and a line for each of the first things that went wrong."""
    async with running_site(folder) as site:
        questions = await prepare_questions(site.engines["e0"].url)
        clients = Clients(questions, site.replicas, site.engines, seed)
        asking = asyncio.create_task(clients.run(_CLIENTS))
        memory = Memory(site)
        watching = asyncio.create_task(memory.watch())
        began_at = time.monotonic()
        try:
            harms = await _torment(site, site.victims, seconds, seed)
            watching.cancel()
            everybody = [replace(victim, mortal=True) for victim in site.victims]
            harms += await _torment(site, everybody, seconds * _FINALE_RATIO, seed + 1)
            tormented_seconds = time.monotonic() - began_at
            before = clients.verdicts.counts.copy()
            await asyncio.sleep(_CALM_SECONDS)
            calm = clients.verdicts.counts - before
        finally:
            clients.stopping.set()
            watching.cancel()
        await asking
        left = await site.settle()
    figures = _figures(clients.verdicts, harms)
    figures["harms_spared"] = len(Harm) * len(site.victims) - len(harms)
    figures["seconds"] = tormented_seconds
    figures["in_flight_left"] = left
    figures["memory_growth_ratio"] = memory.growth_ratio
    figures["right_when_calm_ratio"] = calm["right"] / max(1, calm.total())
    return figures, clients.verdicts.details


async def _torment(site: Site, victims: Sequence[Victim], seconds: float, seed: int) -> Harms:
    """Hurt parts for a while; all are well at the end. Returns how often what was done to whom."""
    plan = Plan(victims, seed)
    under_way: dict[str, asyncio.Task[None]] = {}
    done = Harms()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name in [name for name, task in under_way.items() if task.done()]:
            under_way.pop(name).result()
        trouble = plan.next(under_way.keys())
        if trouble is None:
            await asyncio.sleep(0.1)
            continue
        done[trouble.victim, trouble.harm] += 1
        part = site.parts[trouble.victim]
        under_way[part.name] = asyncio.create_task(part.suffer(trouble))
        await asyncio.sleep(trouble.pause_seconds)
    await asyncio.gather(*under_way.values())
    return done


class Memory:
    """Follows the resident memory of the parts that are never killed."""

    def __init__(self, site: Site) -> None:
        self._parts = [site.agents[0], site.replicas[0]]
        self._samples: dict[str, list[int]] = {part.name: [] for part in self._parts}

    async def watch(self) -> None:
        """Sample until cancelled."""
        while True:
            for part in self._parts:
                self._samples[part.name].append(part.resident_bytes())
            await asyncio.sleep(_SAMPLE_SECONDS)

    @property
    def growth_ratio(self) -> float:
        """The most that a part has grown since a third of the run was over."""
        return max(max(s[len(s) // 3 :]) / s[len(s) // 3] for s in self._samples.values())


def _figures(verdicts: Verdicts, harms: Harms) -> dict[str, float]:
    counts = verdicts.counts
    by_harm = {h: sum(n for (_, harm), n in harms.items() if harm is h) for h in Harm}
    errors = sum(n for kind, n in counts.items() if kind.startswith("status_5"))
    others = sum(n for kind, n in counts.items() if kind.startswith("status_")) - errors
    return {
        "right_answers": counts["right"],
        "wrong_answers": counts["wrong"],
        "errors_5xx": errors,
        "other_statuses": others,
        "hung": counts["hung"] + counts["no_replica"],
        "unexplained": counts["unexplained"],
        "broken_streams": counts["broken"],
        "replicas_lost": counts["replica_lost"],
        "p50_seconds": percentile(verdicts.seconds, 0.5),
        "p99_seconds": percentile(verdicts.seconds, 0.99),
        **{f"{harm}s": n for harm, n in sorted(by_harm.items())},
    }
