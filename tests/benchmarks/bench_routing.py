"""Routing policies side by side: the public conversation trace over 16 simulated engines.

Three memory pressures at the trace's own rate, one at twice that rate for the record, and the
same requests with nothing in common. Ours runs the ingress's own router code; the others are
made from their public descriptions (``nearkv.replay.peers``). Figures are means over seeds,
which move arrivals within the trace's rounding of three seconds. ``TRACE`` names another file
in the same format.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog

from nearkv.replay.asking import ReplayQuestion, build_fleet
from nearkv.replay.measuring import Figures, mean_of
from nearkv.replay.peers import PEERS
from nearkv.replay.running import measure
from nearkv.replay.traces import Trace, read_trace, scaled, spread, without_sharing
from nearkv.replay.variants import list_variants
from tests.benchmarks.reporting import report

_ROOT = Path(__file__).resolve().parents[2]
_TRACE = _ROOT.parent / "shared" / "traces" / "mooncake_conversation.jsonl"
_OURS = "cost"
_LEAST_LOADED = "least-loaded"
_SEEDS = (1, 2, 3)
_PROCESSES = 2
_WORSE = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Scene:
    """Memory per engine in blocks of 512 tokens, and how the trace is changed."""

    name: str
    blocks: int
    rate: float = 1.0
    shares: bool = True


SCENES = (
    Scene("tight", 1000),
    Scene("middle", 2700),
    Scene("roomy", 8000),
    Scene("tight_double_rate", 1000, rate=2.0),
)
UNSHARED = Scene("no_sharing", 2700, shares=False)


@dataclass(frozen=True, slots=True)
class Run:
    """One policy on one scene with one seed."""

    scene: Scene
    policy: str
    seed: int


def run(trace: Trace, run: Run) -> tuple[Figures, float]:
    """Return a run's figures, and the processor's seconds that it took."""
    scene = run.scene
    seeded = scaled(spread(trace, run.seed), scene.rate)
    if not scene.shares:
        seeded = without_sharing(seeded)
    (variant,) = list_variants([run.policy], [])
    question = ReplayQuestion(trace=_TRACE, variants=[variant], blocks=scene.blocks)
    fleet = build_fleet(question, trace.block_tokens)
    started_at = time.process_time()
    figures = measure(seeded, fleet, variant, seed=run.seed)
    return figures, time.process_time() - started_at


def list_runs() -> list[Run]:
    """Return everything that is measured."""
    policies = {scene: [_OURS, *PEERS] for scene in SCENES}
    policies[UNSHARED] = [_OURS, _LEAST_LOADED, "least-request"]
    return [
        Run(scene, policy, seed)
        for scene, named in policies.items()
        for policy in named
        for seed in _SEEDS
    ]


def gather(runs: Sequence[Run], measured: Sequence[Figures]) -> dict[str, dict[str, Figures]]:
    """Return the means over seeds by scene and policy."""
    by_name: dict[str, dict[str, list[Figures]]] = {}
    for each, figures in zip(runs, measured, strict=True):
        by_name.setdefault(each.scene.name, {}).setdefault(each.policy, []).append(figures)
    return {
        scene: {policy: mean_of(each) for policy, each in policies.items()}
        for scene, policies in by_name.items()
    }


def figures_of(means: Mapping[str, Mapping[str, Figures]], policy: str) -> dict[str, float]:
    """Return one policy's figures in all scenes, by name."""
    found: dict[str, float] = {}
    for scene, policies in means.items():
        if policy in policies:
            found |= dict(_plain(scene, policies[policy]))
    return found


def _plain(scene: str, figures: Figures) -> Iterator[tuple[str, float]]:
    times = figures.first_token_ms
    values = {
        "hit_ratio": figures.hit_ratio,
        "first_token_p50_milliseconds": times.p50,
        "first_token_p90_milliseconds": times.p90,
        "first_token_p99_milliseconds": times.p99,
        "per_token_p99_milliseconds": figures.per_token_ms.p99,
        "skew_ratio": figures.skew_ratio,
        "refused": float(sum(figures.refused.values())),
    }
    for name, value in values.items():
        if value is not None:
            yield f"{scene}_{name}", value


def compare(means: Mapping[str, Mapping[str, Figures]]) -> dict[str, float]:
    """Return ours over the best of all policies of the same run, by scene."""
    found: dict[str, float] = {}
    for scene in SCENES:
        policies = means[scene.name]
        ours = policies[_OURS]
        best_hits = max(each.hit_ratio or 0.0 for each in policies.values())
        found[f"{scene.name}_hit_of_best_ratio"] = (ours.hit_ratio or 0.0) / best_hits
        for share in ("p90", "p99"):
            others = [_time(f, share) for name, f in policies.items() if name != _OURS]
            found[f"{scene.name}_{share}_over_best_other_ratio"] = _time(ours, share) / min(others)
    policies = means[UNSHARED.name]
    for share in _WORSE:
        others = [_time(f, share) for name, f in policies.items() if name != _OURS]
        ratio = _time(policies[_OURS], share) / min(others)
        found[f"{UNSHARED.name}_{share}_over_least_loaded_ratio"] = ratio
    return found


def _time(figures: Figures, share: str) -> float:
    value: float | None = getattr(figures.first_token_ms, share)
    return float("inf") if value is None else value


def main() -> int:
    """Measure everything, report."""
    path = Path(os.environ.get("TRACE") or _TRACE)
    trace = read_trace(path)
    runs = list_runs()
    with ProcessPoolExecutor(_PROCESSES, initializer=_be_quiet) as pool:
        results = list(pool.map(run, [trace] * len(runs), runs))
    means = gather(runs, [figures for figures, _ in results])
    figures = compare(means) | figures_of(means, _OURS)
    figures["longest_run_processor_seconds"] = max(seconds for _, seconds in results)
    peers = {name: figures_of(means, name) for name in (*PEERS, _LEAST_LOADED)}
    return report("routing", figures, peers)


def _be_quiet() -> None:
    """Log no decision: there are hundreds of thousands."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


if __name__ == "__main__":
    sys.exit(main())
