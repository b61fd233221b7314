"""``nearkv plan``: whether moving KV cache pays, for a model, a GPU and links."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nearkv.break_even import (
    GPU_EFFECTIVE_FLOPS,
    LINK_BYTES_PER_SECOND,
    Link,
    PullEstimate,
    break_even_tokens,
    estimate_pull,
)
from nearkv.errors import NearkvError
from nearkv.kv_size import ModelShape, read_shape

_GIGA = 1e9


class PlanError(NearkvError):
    """The question cannot be answered as it was put."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What is asked: as it came from the command line."""

    model: Path
    gpu: str
    gpus: int
    links: Sequence[str]
    tokens: Sequence[int]
    parameters_billion: float | None = None
    kv_dtype: str | None = None


def run_plan(question: PlanQuestion, *, as_json: bool) -> None:
    """Print the break-even table; raises :class:`NearkvError` for what it cannot answer."""
    shape = load_shape(
        question.model,
        kv_dtype=question.kv_dtype,
        parameters_billion=question.parameters_billion,
    )
    effective_flops = effective_flops_of(question.gpu) * question.gpus
    estimates = {
        link: [
            estimate_pull(shape, n, link, effective_flops=effective_flops) for n in question.tokens
        ]
        for link in map(parse_link, question.links)
    }
    thresholds = {
        link: break_even_tokens(shape, link, effective_flops=effective_flops) for link in estimates
    }
    if as_json:
        text = json.dumps(describe(shape, estimates, thresholds), indent=2) + "\n"
    else:
        text = f"recompute on {question.gpus} x {question.gpu}; " + render(
            shape, estimates, thresholds
        )
    sys.stdout.write(text)


def load_shape(
    model: Path, *, kv_dtype: str | None, parameters_billion: float | None
) -> ModelShape:
    """Read a model's shape from its folder or its config.json."""
    path = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"--model: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"--model: {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlanError(f"--model: {path} does not hold an object")
    shape = read_shape(config, kv_dtype=kv_dtype)
    if parameters_billion is not None:
        return replace(shape, parameters=round(parameters_billion * _GIGA))
    if shape.parameters is None:
        raise PlanError(
            "--parameters: needed for this model, as its weights cannot be told from its "
            "configuration (active parameters per token, in billions)"
        )
    return shape


def effective_flops_of(gpu: str) -> float:
    """Return a GPU's effective FLOP/s by name, or from a number of TFLOP/s."""
    if gpu.lower() in GPU_EFFECTIVE_FLOPS:
        return GPU_EFFECTIVE_FLOPS[gpu.lower()]
    try:
        return _positive(gpu) * 1e12
    except ValueError:
        known = ", ".join(sorted(GPU_EFFECTIVE_FLOPS))
        raise PlanError(
            f"--gpu: {gpu!r} is neither one of {known} nor effective TFLOP/s as a number"
        ) from None


def parse_link(text: str) -> Link:
    """Parse ``name`` or ``GB/s`` or ``GB/s@milliseconds of set-up``."""
    if text.lower() in LINK_BYTES_PER_SECOND:
        return Link(text.lower(), LINK_BYTES_PER_SECOND[text.lower()])
    bandwidth, _, setup = text.partition("@")
    try:
        setup_seconds = _positive(setup) / 1e3 if setup else 0.001
        return Link(f"{bandwidth} GB/s", _positive(bandwidth) * _GIGA, setup_seconds)
    except ValueError:
        known = ", ".join(LINK_BYTES_PER_SECOND)
        raise PlanError(
            f"--link: {text!r} is neither one of {known} nor GB/s[@ms], such as 12.2@0.5"
        ) from None


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def describe(
    shape: ModelShape,
    estimates: dict[Link, list[PullEstimate]],
    thresholds: dict[Link, int | None],
) -> dict[str, Any]:
    """Return the answer as JSON types; seconds and bytes."""
    return {
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "parameters": shape.parameters,
        "links": [
            {
                "link": link.name,
                "bytes_per_second": link.bytes_per_second,
                "setup_seconds": link.setup_seconds,
                "pays_from_tokens": thresholds[link],
                "estimates": [
                    {
                        "tokens": e.tokens,
                        "kv_bytes": e.kv_bytes,
                        "recompute_seconds": e.recompute_seconds,
                        "pull_seconds": e.pull_seconds,
                        "break_even_bytes_per_second": e.break_even_bytes_per_second,
                        "pays": e.pays,
                    }
                    for e in found
                ],
            }
            for link, found in estimates.items()
        ],
    }


def render(
    shape: ModelShape,
    estimates: dict[Link, list[PullEstimate]],
    thresholds: dict[Link, int | None],
) -> str:
    """Return the answer as text: one row per prompt length, one column per link."""
    links = list(estimates)
    lines = [
        f"KV cache: {shape.kv_bytes_per_token:,} bytes per token",
        "",
        "".join(
            [
                f"{'tokens':>8} {'KV':>10} {'recompute':>10} {'break-even':>11}",
                *(f" {'pull ' + link.name:>15}     " for link in links),
            ]
        ).rstrip(),
    ]
    for row in zip(*estimates.values(), strict=True):
        first = row[0]
        cells = [
            f"{first.tokens:>8,} {_size(first.kv_bytes):>10} {_time(first.recompute_seconds):>10}",
            f" {_rate(first.break_even_bytes_per_second):>11}",
            *(f" {_time(e.pull_seconds):>15}{' pays' if e.pays else '     '}" for e in row),
        ]
        lines.append("".join(cells).rstrip())
    lines.append("")
    for link in links:
        least = thresholds[link]
        verdict = "never pays" if least is None else f"pays from {least:,} tokens on"
        lines.append(f"{link.name}: a pull {verdict}")
    return "\n".join(lines) + "\n"


def _size(count: int) -> str:
    return f"{count / _GIGA:.2f} GB" if count >= _GIGA / 10 else f"{count / 1e6:.1f} MB"


def _rate(bytes_per_second: float) -> str:
    return f"{_size(round(bytes_per_second))}/s"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
