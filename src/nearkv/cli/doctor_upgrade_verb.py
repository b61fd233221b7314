"""The options of ``nearkv doctor upgrade``; what it does is imported when it runs."""

from enum import Enum
from typing import Annotated

import typer

from nearkv.cli.asking_options import Ca, Cert, Key, Timeout, TlsName


class UpgradeOutput(Enum):
    """Forms of output of ``doctor upgrade``."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def doctor_upgrade(  # noqa: PLR0913, PLR0917 - one parameter per option
    old_url: Annotated[str, typer.Argument(metavar="OLD_URL", help="The engine as it is.")],
    new_url: Annotated[str, typer.Argument(metavar="NEW_URL", help="The engine to go to.")],
    model: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Default: the first model of the old engine."),
    ] = None,
    no_prompt: Annotated[  # noqa: FBT002 - typer's way to declare a switch
        bool,
        typer.Option(
            "--no-prompt", help="Send no prompt: KV events and KV transfer are not compared."
        ),
    ] = False,
    old_events: Annotated[
        str,
        typer.Option(
            metavar="LIVE[,REPLAY]",
            help="KV events of the old engine as reached from here, such as "
            "tcp://h:5557,tcp://h:5558. Default: as the engine tells.",
        ),
    ] = "",
    new_events: Annotated[
        str, typer.Option(metavar="LIVE[,REPLAY]", help="The same of the new engine.")
    ] = "",
    event_seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="How long to wait for KV events.")
    ] = 5.0,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            envvar="NEARKV_ENGINE_API_KEY",
            help="For engines that were started with --api-key.",
        ),
    ] = None,
    agents: Annotated[
        list[str] | None,
        typer.Option(
            "--agent",
            metavar="URL",
            help="The agent of one of the engines, to compare versions of KV transfer; repeatable.",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(metavar="TEXT", envvar="NEARKV_TOKEN", help="Bearer token of the agents."),
    ] = None,
    timeout_seconds: Timeout = 30.0,
    output: Annotated[
        UpgradeOutput, typer.Option("-o", "--output", help="Form.")
    ] = UpgradeOutput.TABLE,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    tls_name: TlsName = "",
) -> None:
    """Compare two running engines before an upgrade: what nearkv loses by the new one.

    Each engine gets one prompt of two blocks, three times, for one token each, and another one
    where its KV events were missed.

    Exit status 1 when something breaks, or an engine does not answer.
    """
    from nearkv.certificates import ClientFiles  # noqa: PLC0415 - keeps --help quick
    from nearkv.cli.doctor_upgrade import (  # noqa: PLC0415 - as above
        UpgradeQuestion,
        run_upgrade,
    )

    question = UpgradeQuestion(
        old_url=old_url,
        new_url=new_url,
        model=model,
        send_prompt=not no_prompt,
        agents=agents or [],
        old_events=old_events,
        new_events=new_events,
        event_seconds=event_seconds,
        timeout_seconds=timeout_seconds,
        api_key=api_key,
        token=token,
        files=ClientFiles(ca, cert, key, tls_name),
    )
    raise typer.Exit(run_upgrade(question, output=output.value))
