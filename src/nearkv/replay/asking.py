"""A whole replay, as it was asked for: trace, fleet, variants, seeds (pure but for the trace)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from nearkv.replay.engine_model import EngineProfile
from nearkv.replay.errors import ReplayError
from nearkv.replay.fleet_feed import EngineSpec, LinkProfile
from nearkv.replay.measuring import Figures, curve_ms, mean_of, summarise
from nearkv.replay.presets import PRESETS
from nearkv.replay.running import Fleet, Variant, replay
from nearkv.replay.simulation import Surroundings
from nearkv.replay.traces import Trace, read_trace, scaled, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayQuestion:
    """What is asked; ``None`` leaves a figure to the preset.

    With ``prefill_engines``, so many of the engines compute prompts only, and the others
    answer; KV moves over ``link``.
    """

    trace: Path
    variants: Sequence[Variant]
    engines: int = 16
    prefill_engines: int = 0
    preset: str = "70b-8xa100"
    blocks: int | None = None
    prefill_tokens_per_second: float | None = None
    step_ms: float | None = None
    chunk_tokens: int = 8192
    max_running: int = 256
    link: LinkProfile | None = None
    block_tokens: int | None = None
    model: str | None = None
    rate_scale: float = 1.0
    spreads: bool = True
    limit: int | None = None
    warm_up_ratio: float = 0.0
    seeds: int = 1
    state_lag_ms: float = 50.0


class Row(msgspec.Struct, frozen=True):
    """One variant: the means of its figures, those of each seed, and its distribution."""

    label: str
    policy: str
    figures: Figures
    by_seed: list[Figures]
    first_token_curve_ms: list[float]


def run_all(
    question: ReplayQuestion,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Row]:
    """Return a row for each variant; ``progress`` gets a label, requests done, and all.

    Raises :class:`ReplayError` naming the option or the line of the trace at fault.
    """
    trace = read_trace(question.trace, block_tokens=question.block_tokens, model=question.model)
    if question.limit is not None:
        trace = replace(trace, arrivals=trace.arrivals[: question.limit])
    fleet = build_fleet(question, trace.block_tokens)
    return [_run(question, trace, fleet, variant, progress) for variant in question.variants]


def _run(
    question: ReplayQuestion,
    trace: Trace,
    fleet: Fleet,
    variant: Variant,
    progress: Callable[[str, int, int], None] | None,
) -> Row:
    names = [spec.name for spec in fleet.specs]
    total = len(trace.arrivals) * question.seeds
    figures: list[Figures] = []
    curve: list[float] = []
    for seed in range(1, question.seeds + 1):
        seeded = scaled(spread(trace, seed) if question.spreads else trace, question.rate_scale)
        before = (seed - 1) * len(trace.arrivals)

        def tell(done: int, before: int = before) -> None:
            if progress is not None:
                progress(variant.label, before + done, total)

        outcomes = replay(seeded, fleet, variant, seed=seed, progress=tell)
        figures.append(summarise(outcomes, names, warm_up_ratio=question.warm_up_ratio))
        curve = curve or curve_ms(outcomes, warm_up_ratio=question.warm_up_ratio)
    return Row(variant.label, variant.policy, mean_of(figures), figures, curve)


def build_fleet(question: ReplayQuestion, block_tokens: int) -> Fleet:
    """Return the simulated fleet; raises :class:`ReplayError` naming the option at fault."""
    preset = PRESETS.get(question.preset)
    if preset is None:
        raise ReplayError(f"--preset: {question.preset!r} is none of {', '.join(PRESETS)}")
    if not 0 <= question.prefill_engines < question.engines:
        raise ReplayError("--prefill-engines: must be fewer than --engines")
    step_seconds = preset.step_seconds if question.step_ms is None else question.step_ms / 1000
    profile = EngineProfile(
        blocks=question.blocks or max(1, preset.kv_tokens // block_tokens),
        block_tokens=block_tokens,
        prefill_tokens_per_second=(
            question.prefill_tokens_per_second or preset.prefill_tokens_per_second
        ),
        chunk_tokens=question.chunk_tokens,
        step_seconds=step_seconds,
        step_seconds_per_kv_token=preset.step_seconds_per_kv_token,
        max_running=question.max_running,
        kv_bytes_per_token=preset.kv_bytes_per_token,
    )
    link = question.link
    if link is None and question.prefill_engines:
        link = LinkProfile()
    around = Surroundings(state_lag_seconds=question.state_lag_ms / 1000, link=link)
    return Fleet(list(_specs(question, profile)), around)


def _specs(question: ReplayQuestion, profile: EngineProfile) -> list[EngineSpec]:
    width = len(str(question.engines - 1))
    roles = ["both"] * question.engines
    if question.prefill_engines:
        others = question.engines - question.prefill_engines
        roles = ["prefill"] * question.prefill_engines + ["decode"] * others
    return [
        EngineSpec(f"engine-{number:0{width}}", role, profile) for number, role in enumerate(roles)
    ]
