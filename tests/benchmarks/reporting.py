"""Printing and keeping a benchmark's figures, and holding them to the bars."""

import ctypes
import gc
import json
import os
import platform
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_BARS = Path(__file__).with_name("bars.toml")


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of the samples do not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(samples: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(samples)


def shortfalls(name: str, figures: Mapping[str, float]) -> list[str]:
    """Return a line for each bar that the figures miss, or for which there is no figure."""
    bars = tomllib.loads(_BARS.read_text())[name]
    lines = []
    for figure, bar in bars.items():
        value = figures.get(figure)
        if value is None:
            lines.append(f"{figure}: not measured")
        elif "min" in bar and value < bar["min"]:
            lines.append(f"{figure}: {value:.6g}, wanted at least {bar['min']:g}")
        elif "max" in bar and value > bar["max"]:
            lines.append(f"{figure}: {value:.6g}, wanted at most {bar['max']:g}")
    return lines


def report(
    name: str, figures: Mapping[str, float], peers: Mapping[str, Mapping[str, float]]
) -> int:
    """Print figures beside peers' and bars, write build/bench/<name>.json, return an exit code.

    The code is 1 only under ``CHECK=1`` and when a bar is missed.
    """
    bars = tomllib.loads(_BARS.read_text())[name]
    width = max(map(len, figures))
    write = sys.stdout.write
    write(f"{'':{width}}  {'nearkv':>12}  {'bar':>14}")
    write("".join(f"  {peer:>14}" for peer in peers) + "\n")
    for figure, value in figures.items():
        bar = bars.get(figure, {})
        shown = " ".join(
            f"{'>=' if kind == 'min' else '<='} {limit:g}" for kind, limit in bar.items()
        )
        write(f"{figure:{width}}  {value:12.6g}  {shown:>14}")
        for peer in peers.values():
            write(f"  {peer[figure]:14.6g}" if figure in peer else f"  {'-':>14}")
        write("\n")
    missed = shortfalls(name, figures)
    for line in missed:
        write(f"below the bar: {line}\n")
    _keep(name, figures, peers, missed)
    return 1 if missed and os.environ.get("CHECK") == "1" else 0


def _keep(
    name: str,
    figures: Mapping[str, float],
    peers: Mapping[str, Mapping[str, float]],
    missed: Sequence[str],
) -> None:
    folder = _ROOT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    machine = {"python": platform.python_version(), "cores": os.cpu_count()}
    kept = {"figures": figures, "peers": peers, "below_bar": missed, "machine": machine}
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=2) + "\n")


def resident_bytes() -> int:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def return_freed_memory() -> None:
    """Collect garbage and have the C library give freed memory back, so that only use counts."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
