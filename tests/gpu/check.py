"""``make check-gpu``: everything that only a GPU can show, in one run of at most five minutes.

Prints a table and writes it as JSON. The exit code is 0 when every required check that could
be made passed, 1 when one failed, and 2 where there is no GPU.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nearkv.transfer.cuda.driver import Driver, load_driver
from nearkv.transfer.errors import PullError
from tests.gpu import checks, engine_checks
from tests.gpu.nvml_truth import check_nvml
from tests.gpu.results import (
    EXIT_NO_GPU,
    Finding,
    Outcome,
    Result,
    SkippedError,
    WrongError,
    exit_code,
    line_of,
    shorten,
    write_results,
)
from tests.gpu.stage import ROOT, ProcessStage, Stage
from tests.gpu.vllm_check import check_vllm

BUDGET_SECONDS = 300.0
_VLLM_SECONDS = 60.0
"""With less time left than this, engines are not even started."""

ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Item:
    """A check with its name. Where it is required, a run without it does not pass."""

    name: str
    check: checks.Check
    required: bool = True


ITEMS = (
    Item("sharing", checks.check_sharing),
    Item("descriptors", checks.check_descriptors),
    Item("descriptors-split-pid", checks.check_descriptors_split),
    Item("ipc-handles", checks.check_handles, required=False),
    Item("ipc-handles-split-pid", checks.check_handles_split, required=False),
    Item("device-copies", checks.check_device_copies),
    Item("staged-tcp", checks.check_staged_stream),
    Item("pinned-memfd", checks.check_pinned),
    Item("killed-engine", checks.check_killed_engine),
    Item("held-descriptor", checks.check_held_descriptor),
    Item("context-cost", checks.check_context_cost, required=False),
    Item("movers", engine_checks.check_movers),
    Item("torch-hook", engine_checks.check_torch_hook),
    Item("readiness", engine_checks.check_readiness),
    Item("nixl", engine_checks.check_nixl, required=False),
    Item("nixl-split-pid", engine_checks.check_nixl_split, required=False),
)


class Run:
    """Makes checks one after the other, within a time."""

    def __init__(
        self,
        stage: Stage,
        sizes: checks.Sizes,
        *,
        seconds: float = BUDGET_SECONDS,
        tell: Callable[[str], object] = print,
    ) -> None:
        self._stage = stage
        self._sizes = sizes
        self._end = time.monotonic() + seconds
        self._tell = tell
        self.results: list[Result] = []

    @property
    def seconds_left(self) -> float:
        """What is left of the time."""
        return self._end - time.monotonic()

    def make(self, item: Item) -> None:
        """Make a check and note how it ended; a required one that comes too late has failed."""
        self.note(item.name, lambda: item.check(self._stage, self._sizes), required=item.required)

    def note(self, name: str, check: Callable[[], Finding], *, required: bool) -> None:
        """Make a check that takes nothing."""
        began = time.monotonic()
        finding, outcome = Finding(), Outcome.FAILED
        try:
            finding = self._in_time(check)
            outcome = Outcome.FOUND if finding.is_question else Outcome.PASSED
        except SkippedError as error:
            finding, outcome = Finding(str(error)), Outcome.SKIPPED
        except WrongError as error:
            finding = Finding(str(error))
        except Exception as error:  # noqa: BLE001 (one broken check must not hide the others)
            finding = Finding(f"{type(error).__name__}: {error}")
        result = Result(
            name,
            required,
            outcome,
            time.monotonic() - began,
            shorten(finding.detail),
            finding.figures,
        )
        self.results.append(result)
        self._tell(line_of(result))

    def _in_time(self, check: Callable[[], Finding]) -> Finding:
        if self.seconds_left <= 0:
            raise WrongError("no time was left for it")
        return check()


def find_gpu(load: Callable[[], Driver], ordinal: int) -> dict[str, object]:
    """Return what is known of the device without touching it; raises ``PullError``."""
    driver = load()
    device = driver.device(ordinal)
    return {
        "name": driver.device_name(device),
        "uuid": driver.device_uuid(device),
        "devices": driver.device_count(),
        "cuda": driver.version(),
    }


def main(arguments: Sequence[str] | None = None, load: Callable[[], Driver] = load_driver) -> int:
    """Run the checks; returns the exit code."""
    options = _parse(arguments)
    try:
        device = find_gpu(load, options.ordinal)
    except PullError as error:
        print(f"no GPU here: {error}")  # noqa: T201 (what a command is for)
        return EXIT_NO_GPU
    print(", ".join(f"{name} {value}" for name, value in device.items()))  # noqa: T201 (as above)
    stage = ProcessStage(options.ordinal, str(options.engine_python))
    run = Run(stage, checks.Sizes(), seconds=options.seconds)
    if not options.only or "nvml" in options.only:
        run.note("nvml", check_nvml, required=True)
    for item in ITEMS:
        if not options.only or item.name in options.only:
            run.make(item)
    if not options.only or "vllm" in options.only:
        run.note("vllm", lambda: _with_engines(run.seconds_left), required=True)
    write_results(options.output, device, run.results)
    return exit_code(run.results)


def _with_engines(seconds: float) -> Finding:
    if seconds < _VLLM_SECONDS:
        raise SkippedError(f"only {seconds:.0f} s are left, engines take longer to start")
    return check_vllm(seconds)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check-gpu", description=__doc__)
    python = ENGINE_PYTHON if ENGINE_PYTHON.is_file() else Path(sys.executable)
    names = ["nvml"] + [item.name for item in ITEMS] + ["vllm"]
    parser.add_argument("--ordinal", type=int, default=0, help="which of the visible devices")
    parser.add_argument("--engine-python", type=Path, default=python, help="has torch for CUDA")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "check-gpu.json")
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS)
    parser.add_argument("--only", nargs="*", choices=names, default=[], help="these checks only")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
