"""The options of ``nearkv replay``; what it does is imported when it runs, so --help is quick."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class ReplayOutput(Enum):
    """Forms of output of ``replay``."""

    TABLE = "table"
    JSON = "json"


def replay(  # noqa: PLR0913, PLR0917 - one parameter per option
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="A public trace (JSONL with hash_ids), or the ingress's decisions.file.",
        ),
    ],
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="cost, prefix-first, least-loaded, round-robin; or in the manner of others: "
            "random, least-request, string-trie, llm-d-style, dynamo-style, dynamo-style-8. "
            "Repeatable. Default: cost and least-loaded.",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=V[,V...]",
            help="A setting of the ingress, or several values to try, such as "
            "cost.crowding_weight=0,1,3; repeatable.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The ingress's settings file.")
    ] = None,
    engines: Annotated[int, typer.Option(min=1, max=1024, help="Engines in the fleet.")] = 16,
    prefill_engines: Annotated[
        int,
        typer.Option(min=0, help="Of these, engines for prefill only; the others decode then."),
    ] = 0,
    preset: Annotated[
        str, typer.Option(help="What an engine can do: 8b-h100, 70b-4xh100 or 70b-8xa100.")
    ] = "70b-8xa100",
    blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks per engine, of the trace's block size.")
    ] = None,
    prefill_rate: Annotated[
        float | None, typer.Option(min=1, help="Prompt tokens per second of one engine.")
    ] = None,
    step_ms: Annotated[
        float | None, typer.Option(min=0.001, help="A decode step with one request, in ms.")
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens computed in one step.")
    ] = 8192,
    max_running: Annotated[
        int, typer.Option(min=1, help="Requests that one engine runs at once.")
    ] = 256,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="LINK",
            help="How KV may move between engines: a name as in nearkv plan, or GB/s[@set-up ms]. "
            "Default: not at all, or 10 GB/s with --prefill-engines.",
        ),
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that one hash id of a public trace is of.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model to replay, where records are of several.")
    ] = None,
    rate_scale: Annotated[
        float, typer.Option(min=0.001, help="How many times as fast requests come.")
    ] = 1.0,
    spreads: Annotated[  # noqa: FBT002 - typer's way to declare a switch
        bool,
        typer.Option(
            "--spread/--no-spread",
            help="Spread requests of one (rounded) timestamp over the time to the next.",
        ),
    ] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Requests to replay.")] = None,
    warm_up: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of requests not to measure, at first.")
    ] = 0.0,
    seeds: Annotated[
        int, typer.Option(min=1, max=100, help="Runs of each policy; means are shown.")
    ] = 1,
    state_lag_ms: Annotated[
        float, typer.Option(min=0, help="Time until the router hears of an engine's blocks.")
    ] = 50.0,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write drawings: FILE.html is one page, FILE.png one picture."
        ),
    ] = None,
    output: Annotated[
        ReplayOutput, typer.Option("-o", "--output", help="Form.")
    ] = ReplayOutput.TABLE,
) -> None:
    """Replay a trace over simulated engines, with the ingress's own router code.

    Shows for each policy the hit rate, times to the first token (TTFT) and per output token
    (TPOT), the largest over the mean load of engines (SKEW), and refused requests.
    """
    from nearkv.cli.replay import parse_replay_link, run_replay  # noqa: PLC0415 - as above
    from nearkv.replay.asking import ReplayQuestion  # noqa: PLC0415 - as above
    from nearkv.replay.variants import list_variants  # noqa: PLC0415 - as above

    question = ReplayQuestion(
        trace=trace,
        variants=list_variants(
            policies or ["cost", "least-loaded"],
            sets or [],
            config=None if config is None else str(config),
        ),
        engines=engines,
        prefill_engines=prefill_engines,
        preset=preset,
        blocks=blocks,
        prefill_tokens_per_second=prefill_rate,
        step_ms=step_ms,
        chunk_tokens=chunk_tokens,
        max_running=max_running,
        link=None if link is None else parse_replay_link(link),
        block_tokens=block_tokens,
        model=model,
        rate_scale=rate_scale,
        spreads=spreads,
        limit=limit,
        warm_up_ratio=warm_up,
        seeds=seeds,
        state_lag_ms=state_lag_ms,
    )
    run_replay(question, as_json=output is ReplayOutput.JSON, plot=plot)
