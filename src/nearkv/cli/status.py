"""``nearkv status``: ask agents and ingresses, and show what they know."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nearkv.certificates import ClientFiles
from nearkv.cli.fetching import Answer, Endpoint, fetch_all
from nearkv.cli.status_model import IngressStatus
from nearkv.cli.status_table import (
    COLUMNS,
    UNKNOWN,
    WIDE_COLUMNS,
    cells_of,
    list_problems,
    merge_views,
    summarise,
)
from nearkv.cli.trusting import load_trust

_UNHEALTHY_STATUS = 1
_USAGE_STATUS = 2
# Lines longer than the terminal are left to it, as kubectl does: a cut value helps nobody.
_TABLE_WIDTH = 10_000
_STYLES = {
    **dict.fromkeys(("ready", "live", "fresh", "closed", "exact"), "green"),
    **dict.fromkeys(("starting", "replaying", "partial", "aged", "asleep", "draining"), "yellow"),
    **dict.fromkeys(("unreachable", "lost", "unknown", "open"), "red"),
    UNKNOWN: "dim",
}


def run_status(
    *,
    agents: Sequence[str],
    ingresses: Sequence[str],
    output: str,
    token: str | None,
    timeout_seconds: float,
    files: ClientFiles,
) -> int:
    """Show the status of all endpoints; return the exit status.

    ``output`` is ``table``, ``wide``, ``json`` or ``yaml``. Raises ``TrustError`` when the
    ``files`` for TLS cannot be used.
    """
    endpoints = list_endpoints(agents, ingresses, os.environ)
    if not endpoints:
        sys.stderr.write(
            "nearkv: no endpoint to ask; give --agent URL or --ingress URL, "
            "or set NEARKV_AGENTS or NEARKV_INGRESS\n"
        )
        return _USAGE_STATUS
    trust = load_trust(files)
    answers = asyncio.run(
        fetch_all(endpoints, token=token, timeout_seconds=timeout_seconds, certificates=trust)
    )
    if output in ("json", "yaml"):
        sys.stdout.write(_as_document(answers, output))
    else:
        _print_tables(answers, wide=output == "wide")
    problems = [problem for answer in answers for problem in problems_of(answer)]
    for problem in problems:
        sys.stderr.write(f"nearkv: {problem}\n")
    return _UNHEALTHY_STATUS if problems else 0


def list_endpoints(
    agents: Sequence[str], ingresses: Sequence[str], environment: Mapping[str, str]
) -> list[Endpoint]:
    """Return the endpoints to ask: flags, or, when there are none at all, the environment.

    ``NEARKV_AGENTS`` and ``NEARKV_INGRESS`` hold URLs separated by commas.
    """
    if not agents and not ingresses:
        agents = _split(environment.get("NEARKV_AGENTS", ""))
        ingresses = _split(environment.get("NEARKV_INGRESS", ""))
    return [
        *(Endpoint("agent", _with_scheme(url)) for url in agents),
        *(Endpoint("ingress", _with_scheme(url)) for url in ingresses),
    ]


def problems_of(answer: Answer) -> list[str]:
    """Return what is wrong with an endpoint, each line naming the endpoint."""
    name = f"{answer.endpoint.component} {answer.endpoint.url}"
    if answer.status is None:
        return [f"{name}: {answer.error}"]
    return [f"{name}: {problem}" for problem in list_problems(answer.status)]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"


def _as_document(answers: Sequence[Answer], output: str) -> str:
    document = {
        kind: [answer.document for answer in answers if _holds(answer, component)]
        for kind, component in (("agents", "agent"), ("ingresses", "ingress"))
    }
    errors = [
        {"component": answer.endpoint.component, "url": answer.endpoint.url, "error": answer.error}
        for answer in answers
        if answer.document is None
    ]
    whole = {**document, "errors": errors}
    if output == "yaml":
        return msgspec.yaml.encode(whole).decode()
    return msgspec.json.format(msgspec.json.encode(whole)).decode() + "\n"


def _holds(answer: Answer, component: str) -> bool:
    return answer.document is not None and answer.endpoint.component == component


def _print_tables(answers: Sequence[Answer], *, wide: bool) -> None:
    console = Console(width=_TABLE_WIDTH, highlight=False, markup=False, emoji=False)
    statuses = [answer.status for answer in answers if answer.status is not None]
    views = merge_views(statuses)
    if views:
        console.print(_table([cells_of(view, wide=wide) for view in views], wide=wide))
    elif statuses:
        console.print("No engines.")
    for answer in answers:
        if isinstance(answer.status, IngressStatus):
            console.print(f"ingress {answer.endpoint.url}: {summarise(answer.status)}")


def _table(rows: Sequence[Mapping[str, str]], *, wide: bool) -> Table:
    columns = COLUMNS + (WIDE_COLUMNS if wide else ())
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        # Text, not str: a model's name may look like rich markup.
        table.add_row(*(Text(row[column], _STYLES.get(row[column], "")) for column in columns))
    return table
