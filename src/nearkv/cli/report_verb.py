"""The options of ``nearkv report``; what it does is imported when it runs, so --help is quick."""

from enum import Enum
from typing import Annotated

import typer

from nearkv.cli.asking_options import Agents, Ca, Cert, Ingresses, Key, Timeout, TlsName


class ReportOutput(Enum):
    """Forms of output of ``report``."""

    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"


def report(  # noqa: PLR0913, PLR0917 - one parameter per option
    ingresses: Ingresses = None,
    agents: Agents = None,
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
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    tls_name: TlsName = "",
    timeout_seconds: Timeout = 5.0,
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
