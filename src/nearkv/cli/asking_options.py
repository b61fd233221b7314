"""Options shared by verbs that ask agents and ingresses: whom, how long, and how to trust them."""

from pathlib import Path
from typing import Annotated

import typer

Agents = Annotated[
    list[str] | None,
    typer.Option(
        "--agent",
        metavar="URL",
        help="An agent; repeatable. Default: NEARKV_AGENTS, comma-separated.",
    ),
]
Ingresses = Annotated[
    list[str] | None,
    typer.Option(
        "--ingress",
        metavar="URL",
        help="An ingress; repeatable. Default: NEARKV_INGRESS, comma-separated.",
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Deadline of each request in seconds.")
]
Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca", envvar="NEARKV_CA", help="CA (PEM) of those asked; default: the system's CAs."
    ),
]
Cert = Annotated[
    Path | None,
    typer.Option(
        "--cert", envvar="NEARKV_CERT", help="Certificate (PEM) to show; goes with --key."
    ),
]
Key = Annotated[
    Path | None,
    typer.Option("--key", envvar="NEARKV_KEY", help="Its private key (PEM)."),
]
TlsName = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        envvar="NEARKV_TLS_NAME",
        help="Name to find in the certificates of those asked; default: the host in the URL.",
    ),
]
