"""The command line: ``python -m nearkv.demo setup|demo|run``."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from nearkv.demo.engine_env import ensure_engine_env
from nearkv.demo.errors import DemoError, SetUpError
from nearkv.demo.interrupting import run_interruptibly
from nearkv.demo.models import check_model, ensure_model
from nearkv.demo.pd_show import PdShow, PdShowOptions
from nearkv.demo.rendering import Screen
from nearkv.demo.scenario import MOST_ROUNDS
from nearkv.demo.showing import Outcome, Show, ShowOptions
from nearkv.demo.stage import EngineKind
from nearkv.demo.workspace import Workspace

FAILED_STATUS = 1
INTERRUPTED_STATUS = 130


class Action(StrEnum):
    """What to do."""

    SETUP = "setup"
    DEMO = "demo"
    RUN = "run"


class Output(StrEnum):
    """Form of the result; with ``json``, everything else goes to standard error."""

    TABLE = "table"
    JSON = "json"


app = typer.Typer(add_completion=False)


@app.command()
def command(  # noqa: PLR0913 - one parameter per command-line option
    action: Annotated[
        Action,
        typer.Argument(
            help="setup makes the engine environment and the models; demo plays the "
            "scenario and exits; run plays it and keeps serving."
        ),
    ],
    *,
    engine: Annotated[
        EngineKind, typer.Option(envvar="ENGINE", help="Real vLLM, or the double of the tests.")
    ] = EngineKind.VLLM,
    model: Annotated[
        str, typer.Option(envvar="MODEL", help="small, tiny or a model's folder; for vLLM only.")
    ] = "small",
    compare: Annotated[
        bool, typer.Option(envvar="COMPARE", help="Repeat the rounds under other policies.")
    ] = False,
    pd: Annotated[
        bool,
        typer.Option("--pd", envvar="PD", help="Prefill on one engine, decode on the other."),
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=2, max=MOST_ROUNDS, help="Questions about the first document.")
    ] = 10,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the ingress; default: a free one.")
    ] = None,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="Form of the result.")
    ] = Output.TABLE,
) -> None:
    """Hold a conversation about long documents with two engines behind the ingress.

    The exit status is 0 when the bars are met, and 1 when they are not or something failed.
    """
    workspace = Workspace.default()
    try:
        with Screen(Console(stderr=output is Output.JSON)) as screen:
            if action is Action.SETUP:
                _set_up(("tiny", "small"), workspace, screen)
                return
            model_dir = None
            if engine is EngineKind.VLLM:
                [model_dir] = _set_up((model,), workspace, screen)
            options = ShowOptions(
                engine=engine,
                model_dir=model_dir,
                compare=compare,
                rounds=rounds,
                port=port,
                keep_serving=action is Action.RUN,
            )
            show = _choose_show(options, workspace, screen, pd=pd)
            outcome = run_interruptibly(show.run())
    except DemoError as error:
        sys.stderr.write(f"error: {error}\n")
        raise typer.Exit(FAILED_STATUS) from error
    if outcome is not None and output is Output.JSON:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(outcome.report)) + b"\n")
    raise typer.Exit(exit_status(outcome, action))


def _choose_show(
    options: ShowOptions, workspace: Workspace, screen: Screen, *, pd: bool
) -> Show | PdShow:
    if not pd:
        return Show(options, workspace, screen)
    if options.model_dir is None:
        raise SetUpError("P/D is shown with real engines only: leave ENGINE away")
    pd_options = PdShowOptions(
        model_dir=options.model_dir,
        rounds=options.rounds,
        port=options.port,
        keep_serving=options.keep_serving,
    )
    return PdShow(pd_options, workspace, screen)


def _set_up(models: tuple[str, ...], workspace: Workspace, screen: Screen) -> list[Path]:
    for model in models:
        check_model(model)  # a wrong path must not cost an installation first
    ensure_engine_env(workspace, screen.progress)
    return [ensure_model(model, workspace, screen.progress) for model in models]


def exit_status(outcome: Outcome | None, action: Action) -> int:
    """Choose the exit status; Ctrl-C (no outcome) is the proper end of ``run`` only."""
    if outcome is None:
        return 0 if action is Action.RUN else INTERRUPTED_STATUS
    return 0 if outcome.passed else FAILED_STATUS


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
