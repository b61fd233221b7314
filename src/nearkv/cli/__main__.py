"""Entry point of ``nearkv``: the verbs and their options.

Exit status: 0 all is well, 1 something is unhealthy or does not answer (said on standard
error), 2 the command line or the configuration is wrong.
"""

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from nearkv._version import __version__
from nearkv.cli.asking_options import Agents, Ca, Cert, Ingresses, Key, Timeout, TlsName
from nearkv.cli.decision_verbs import decisions, explain
from nearkv.cli.doctor_upgrade_verb import doctor_upgrade
from nearkv.cli.replay_verb import replay
from nearkv.cli.report_verb import report
from nearkv.errors import NearkvError

_USAGE_STATUS = 2

app = typer.Typer(
    name="nearkv",
    help="Look into KV-cache-aware routing: engines, their caches, and the configuration.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
doctor = typer.Typer(help="Find out why something does not work.", no_args_is_help=True)
app.add_typer(doctor, name="doctor")
app.add_typer(explain, name="explain")
app.command(short_help="Show the latest requests: where they went, and why.")(decisions)
app.command(short_help="Replay a trace over simulated engines: policies side by side.")(replay)
app.command(short_help="Say where the time goes, and whether P/D separation pays.")(report)


class Output(Enum):
    """Forms of output."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


class PlanOutput(Enum):
    """Forms of output of ``plan``."""

    TABLE = "table"
    JSON = "json"


class DoctorOutput(Enum):
    """Forms of output of ``doctor``."""

    TABLE = "table"
    JSON = "json"


class ExplainOutput(Enum):
    """Forms of output of ``explain-pod``."""

    TABLE = "table"
    JSON = "json"


class LintOutput(Enum):
    """Forms of output of ``lint-scheduler``."""

    TEXT = "text"
    JSON = "json"


class Component(Enum):
    """Components that have settings."""

    AGENT = "agent"
    INGRESS = "ingress"
    EXTENDER = "extender"


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer's way to call it
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[  # noqa: FBT002 - typer's way to declare a switch
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Hold the options of the command itself."""


@app.command(short_help="Show engines: KV use, freshness, hits.")
def status(  # noqa: PLR0913, PLR0917 - one parameter per option
    agents: Agents = None,
    ingresses: Ingresses = None,
    output: Annotated[Output, typer.Option("-o", "--output", help="Form.")] = Output.TABLE,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", envvar="NEARKV_TOKEN", help="Bearer token for the status endpoints."
        ),
    ] = None,
    timeout_seconds: Timeout = 5.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    tls_name: TlsName = "",
) -> None:
    """Show engines with KV use, freshness and hits, as agents and ingresses see them."""
    from nearkv.certificates import ClientFiles  # noqa: PLC0415 - keeps --help quick
    from nearkv.cli.status import run_status  # noqa: PLC0415 - keeps --help quick

    raise typer.Exit(
        run_status(
            agents=agents or [],
            ingresses=ingresses or [],
            output=output.value,
            token=token,
            timeout_seconds=timeout_seconds,
            files=ClientFiles(ca, cert, key, tls_name),
        )
    )


@app.command(
    short_help="Print a component's effective configuration.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def config(
    context: typer.Context,
    component: Annotated[Component, typer.Argument(help="Whose settings.")],
    schema: Annotated[  # noqa: FBT002 - typer's way to declare a switch
        bool, typer.Option("--schema", help="Print the JSON schema of the settings instead.")
    ] = False,
) -> None:
    """Print a component's effective configuration, with the source of each value.

    Takes the component's own options too, such as --config FILE; "nearkv-agent --help",
    "nearkv-ingress --help" and "nearkv-extender --help" list them.
    """
    from nearkv.cli.config import print_config, print_schema  # noqa: PLC0415 - as in status

    if schema:
        print_schema(component.value)
    else:
        print_config(component.value, context.args)


@app.command("explain-pod", short_help="Say why a pod was placed as it was.")
def explain_pod(  # noqa: PLR0913, PLR0917 - one parameter per option
    pod: Annotated[str, typer.Argument(metavar="NAMESPACE/NAME", help="The pod.")],
    extender: Annotated[
        str | None,
        typer.Option(metavar="URL", envvar="NEARKV_EXTENDER", help="The extender."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Nodes to show of each decision.")] = 20,
    token: Annotated[
        str | None,
        typer.Option(metavar="TEXT", envvar="NEARKV_TOKEN", help="Bearer token of the extender."),
    ] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    tls_name: TlsName = "",
    timeout_seconds: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Deadline of the request in seconds.")
    ] = 5.0,
    output: Annotated[
        ExplainOutput, typer.Option("-o", "--output", help="Form.")
    ] = ExplainOutput.TABLE,
) -> None:
    """Say why a pod was placed as it was: the extender's last decisions about it, by node."""
    from nearkv.certificates import ClientFiles  # noqa: PLC0415 - keeps --help quick
    from nearkv.cli.explain_pod import (  # noqa: PLC0415 - keeps --help quick
        ExplainQuestion,
        run_explain_pod,
    )

    question = ExplainQuestion(
        pod=pod,
        extender=extender,
        limit=limit,
        token=token,
        files=ClientFiles(ca, cert, key, tls_name),
        timeout_seconds=timeout_seconds,
    )
    raise typer.Exit(run_explain_pod(question, as_json=output is ExplainOutput.JSON))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"nearkv {__version__}")


@app.command(short_help="Say when moving KV cache beats computing it again.")
def plan(  # noqa: PLR0913, PLR0917 - one parameter per option
    model: Annotated[
        Path, typer.Option(help="The model's folder, or its config.json.", show_default=False)
    ],
    gpu: Annotated[
        str, typer.Option(help="a10, l4, l40s, a100, h100, h200, b200, or effective TFLOP/s.")
    ] = "h100",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that share one prefill.")] = 1,
    links: Annotated[
        list[str] | None,
        typer.Option(
            "--link",
            metavar="LINK",
            help="nvlink, 400g-rdma, 100g-rdma, tcp-host, tcp-gpu, or GB/s[@set-up ms]; "
            "repeatable. Default: all named ones but nvlink.",
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option("--tokens", min=1, help="A prompt length; repeatable. Default: 1k to 32k."),
    ] = None,
    parameters: Annotated[
        float | None,
        typer.Option(min=0.001, help="Parameters in billions, active per token for MoE models."),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Element type of the KV cache, such as fp8.")
    ] = None,
    output: Annotated[PlanOutput, typer.Option("-o", "--output", help="Form.")] = PlanOutput.TABLE,
) -> None:
    """Say when moving KV cache between engines beats computing it again."""
    from nearkv.cli.plan import PlanQuestion, run_plan  # noqa: PLC0415 - keeps --help quick

    question = PlanQuestion(
        model=model,
        gpu=gpu,
        gpus=gpus,
        links=links or ["400g-rdma", "100g-rdma", "tcp-host", "tcp-gpu"],
        tokens=tokens or [1024, 4096, 32768],
        parameters_billion=parameters,
        kv_dtype=kv_dtype,
    )
    run_plan(question, as_json=output is PlanOutput.JSON)


@app.command(
    "lint-scheduler", short_help="Say what kube-scheduler would do with its configuration."
)
def lint_scheduler(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A KubeSchedulerConfiguration, or a ConfigMap of it; - reads stdin.",
        ),
    ],
    output: Annotated[LintOutput, typer.Option("-o", "--output", help="Form.")] = LintOutput.TEXT,
) -> None:
    """Say what kube-scheduler would do with its configuration, with a fix for each mistake.

    Exit status 1 when kube-scheduler would not start, or pods would not be scheduled as meant.
    """
    from nearkv.cli.lint_scheduler import run_lint  # noqa: PLC0415 - keeps --help quick

    raise typer.Exit(run_lint(file, as_json=output is LintOutput.JSON))


@doctor.callback()
def doctor_root() -> None:
    """Find out why something does not work."""


@doctor.command("transfer", short_help="Check this host, and the ways between nodes, for KV.")
def doctor_transfer(  # noqa: PLR0913, PLR0917 - one parameter per option
    agents: Annotated[
        list[str] | None,
        typer.Option(
            "--agent",
            metavar="URL",
            help="An agent, to judge ways between nodes; repeatable. Default: NEARKV_AGENTS, "
            "comma-separated.",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", envvar="NEARKV_TOKEN", help="Bearer token for the status endpoints."
        ),
    ] = None,
    timeout_seconds: Timeout = 5.0,
    socket_dir: Annotated[Path, typer.Option(help="Folder of this host's agent.sock.")] = Path(
        "/run/nearkv"
    ),
    require_rdma: Annotated[  # noqa: FBT002 - typer's way to declare a switch
        bool, typer.Option("--require-rdma", help="Fail without RDMA instead of warning.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The agent's settings: a shared store that they name is tried. Default: "
            "NEARKV_AGENT_CONFIG.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        DoctorOutput, typer.Option("-o", "--output", help="Form.")
    ] = DoctorOutput.TABLE,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    tls_name: TlsName = "",
) -> None:
    """Check what moving KV needs on this host, and which way it goes between nodes."""
    from nearkv.certificates import ClientFiles  # noqa: PLC0415 - as in status
    from nearkv.cli.doctor import DoctorQuestion, run_doctor  # noqa: PLC0415 - as in status

    question = DoctorQuestion(
        agents=agents or [],
        token=token,
        timeout_seconds=timeout_seconds,
        socket_dir=socket_dir,
        require_rdma=require_rdma,
        config=config,
        files=ClientFiles(ca, cert, key, tls_name),
    )
    raise typer.Exit(run_doctor(question, as_json=output is DoctorOutput.JSON))


doctor.command("upgrade", short_help="Compare an engine with its next version.")(doctor_upgrade)


def main() -> None:
    """Run the command line; what nearkv refuses to answer becomes one line.

    Trouble with components is for the verbs to show; what is raised up to here lies in the
    question.
    """
    try:
        app()
    except NearkvError as error:
        sys.stderr.write(f"nearkv: {error}\n")
        sys.exit(_USAGE_STATUS)


if __name__ == "__main__":
    main()
