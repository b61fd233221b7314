"""The options of ``nearkv report``; what it does is imported when it runs, so --help is quick."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class ReportOutput(Enum):
    """Forms of output of ``report``."""

    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"


def report(  # noqa: PLR0913, PLR0917 - one parameter per option
    ingresses: Annotated[
        list[str] | None,
        typer.Option(
            "--ingress",
            metavar="URL",
            help="An ingress; repeatable. Default: NEARKV_INGRESS, comma-separated.",
        ),
    ] = None,
    agents: Annotated[
        list[str] | None,
        typer.Option(
            "--agent",
            metavar="URL",
            help="An agent; repeatable. Default: NEARKV_AGENTS, comma-separated.",
        ),
    ] = None,
    engines: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="URL",
            help="An engine; repeatable. Default: those that the agents know.",
        ),
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Ask this Prometheus server instead of the components."),
    ] = None,
    window: Annotated[
        str, typer.Option(help="With --prometheus: how far to look back, such as 30m or 1h.")
    ] = "1h",
    match: Annotated[
        str,
        typer.Option(
            metavar="MATCHERS",
            help="With --prometheus: label matchers of the series, such as 'namespace=\"llm\"'.",
        ),
    ] = "",
    interval: Annotated[
        float,
        typer.Option(
            min=0, max=3600, help="Seconds between two scrapes; 0: once, counters since the start."
        ),
    ] = 0.0,
    link: Annotated[
        str, typer.Option(help="How KV would move: a name as in nearkv plan, or GB/s[@set-up ms].")
    ] = "100g-rdma",
    kv_bytes_per_token: Annotated[
        float | None, typer.Option(min=1, help="KV cache of one token, where no agent tells.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", envvar="NEARKV_TOKEN", help="Bearer token of agents, or of Prometheus."
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            "--ca", envvar="NEARKV_CA", help="CA (PEM) of those asked; default: the system's CAs."
        ),
    ] = None,
    cert: Annotated[
        Path | None,
        typer.Option(
            "--cert", envvar="NEARKV_CERT", help="Certificate (PEM) to show; goes with --key."
        ),
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", envvar="NEARKV_KEY", help="Its private key (PEM).")
    ] = None,
    tls_name: Annotated[
        str,
        typer.Option(
            metavar="TEXT", envvar="NEARKV_TLS_NAME", help="Name to find in their certificates."
        ),
    ] = "",
    timeout_seconds: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Deadline of each request in seconds.")
    ] = 5.0,
    output: Annotated[
        ReportOutput, typer.Option("-o", "--output", help="Form.")
    ] = ReportOutput.TABLE,
) -> None:
    """Say where requests' time goes, and whether to separate prefill from decode.

    Exit status 1 when some endpoint gave nothing; what cannot be known is said to be unknown.
    """
    from nearkv.certificates import ClientFiles  # noqa: PLC0415 - keeps --help quick
    from nearkv.cli.report import ReportQuestion, run_report  # noqa: PLC0415 - as above

    question = ReportQuestion(
        ingresses=ingresses or [],
        agents=agents or [],
        engines=engines or [],
        prometheus=prometheus,
        window=window,
        match=match,
        interval_seconds=interval,
        link=link,
        kv_bytes_per_token=kv_bytes_per_token,
        token=token,
        timeout_seconds=timeout_seconds,
        files=ClientFiles(ca, cert, key, tls_name),
    )
    raise typer.Exit(run_report(question, output=output.value))
