"""The options of ``nearkv decisions`` and ``nearkv explain``."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nearkv.cli.asking_options import Ca, Cert, Ingresses, Key, Timeout, TlsName

if TYPE_CHECKING:
    from nearkv.cli.decisions import Ask

explain = typer.Typer(help="Say why something was decided.", no_args_is_help=True)


class DecisionOutput(Enum):
    """Forms of output."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


_Token = Annotated[
    str | None,
    typer.Option(metavar="TEXT", envvar="NEARKV_TOKEN", help="Bearer token of the ingress."),
]
_Output = Annotated[DecisionOutput, typer.Option("-o", "--output", help="Form.")]


@explain.callback()
def explain_root() -> None:
    """Say why something was decided."""


@explain.command("request", short_help="Say why a request went where it did.")
def explain_request(  # noqa: PLR0913, PLR0917 - one parameter per option
    request: Annotated[str, typer.Argument(metavar="ID", help="Its X-Request-Id.")],
    ingresses: Ingresses = None,
    limit: Annotated[int, typer.Option(min=1, help="Engines to show.")] = 20,
    output: _Output = DecisionOutput.TABLE,
    token: _Token = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    tls_name: TlsName = "",
    timeout_seconds: Timeout = 5.0,
) -> None:
    """Say why a request went where it did: each engine's terms, and what happened then."""
    from nearkv.cli.decisions import run_explain_request  # noqa: PLC0415 - keeps --help quick

    ask = _ask(ingresses, output, token, (ca, cert, key, tls_name), timeout_seconds)
    raise typer.Exit(run_explain_request(ask, request, limit=limit))


def decisions(  # noqa: PLR0913, PLR0917 - one parameter per option
    ingresses: Ingresses = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Requests to show.")] = 20,
    model: Annotated[str, typer.Option(metavar="TEXT", help="Only of this model.")] = "",
    engine: Annotated[str, typer.Option(metavar="ID", help="Only those that it served.")] = "",
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Only with this reason.")] = "",
    min_error_ratio: Annotated[
        float | None,
        typer.Option(min=0, help="Only those whose first token was predicted that far off."),
    ] = None,
    output: _Output = DecisionOutput.TABLE,
    token: _Token = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    tls_name: TlsName = "",
    timeout_seconds: Timeout = 5.0,
) -> None:
    """Show the latest requests: where they went, why, and how long they took."""
    from nearkv.cli.decisions import run_decisions  # noqa: PLC0415 - keeps --help quick

    ask = _ask(ingresses, output, token, (ca, cert, key, tls_name), timeout_seconds)
    asked = {
        "model": model,
        "engine": engine,
        "reason": reason,
        "min_error_ratio": "" if min_error_ratio is None else str(min_error_ratio),
    }
    query = {name: value for name, value in asked.items() if value}
    raise typer.Exit(run_decisions(ask, query, limit=limit))


def _ask(
    ingresses: Sequence[str] | None,
    output: DecisionOutput,
    token: str | None,
    tls: tuple[Path | None, Path | None, Path | None, str],
    timeout_seconds: float,
) -> "Ask":
    """Return whom to ask and how; ``tls`` is CA, certificate, key and the name to find."""
    from nearkv.certificates import ClientFiles  # noqa: PLC0415 - keeps --help quick
    from nearkv.cli.decisions import Ask  # noqa: PLC0415 - as above

    return Ask(
        ingresses=ingresses or [],
        output=output.value,
        token=token,
        files=ClientFiles(*tls),
        timeout_seconds=timeout_seconds,
    )
