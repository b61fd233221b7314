"""The models that the demonstration and the tests serve.

Each is made once into ``build/models/<name>`` by its script, run by the engine
environment's interpreter. A stamp with the hash of everything that went in tells whether a
folder is up to date; a model is made beside its place and moved there when complete, so a
folder that exists is never half a model.
"""

import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nearkv.demo.commands import CommandRunner
from nearkv.demo.engine_env import (
    REQUIREMENTS_PATH,
    STAMP_NAME,
    is_stamped,
    plain_environment,
)
from nearkv.demo.errors import SetUpError
from nearkv.demo.locking import exclusive
from nearkv.demo.workspace import PACKAGE_DIR, Progress, Workspace, silent

BUILD_DEADLINE_SECONDS = 300.0
DOCUMENTS_DIR = PACKAGE_DIR / "documents"


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """How a model is made: a script, the files it reads, and how to name the work."""

    name: str
    script: Path
    inputs: tuple[Path, ...]
    arguments: tuple[str, ...]


def tiny_recipe(workspace: Workspace) -> ModelRecipe:
    """Random weights, and a tokenizer trained on the documents (and the licence, if there)."""
    candidates = (*sorted(DOCUMENTS_DIR.glob("*.txt")), workspace.root / "LICENSE")
    texts = tuple(path for path in candidates if path.is_file())
    script = PACKAGE_DIR / "tiny_model.py"
    return ModelRecipe("tiny", script, texts, tuple(str(path) for path in texts))


def small_recipe() -> ModelRecipe:
    """SmolLM2-135M-Instruct; the requirements file pins the package that holds its weights."""
    return ModelRecipe("small", PACKAGE_DIR / "small_model.py", (REQUIREMENTS_PATH,), ())


def recipe_stamp(script: Path, inputs: Iterable[Path]) -> str:
    """Hash the script and its inputs."""
    digest = hashlib.sha256()
    for path in (script, *inputs):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def ensure_tiny_model(workspace: Workspace, progress: Progress = silent) -> Path:
    """Make the tiny model unless it is there; return its folder."""
    return _ensure(tiny_recipe(workspace), workspace, progress)


def ensure_small_model(workspace: Workspace, progress: Progress = silent) -> Path:
    """Make the small model unless it is there; return its folder."""
    return _ensure(small_recipe(), workspace, progress)


def ensure_model(name_or_path: str, workspace: Workspace, progress: Progress = silent) -> Path:
    """Make ``tiny`` or ``small``, or check that any other value is a model's folder.

    Raises ``SetUpError`` when it is neither.
    """
    if name_or_path == "tiny":
        return ensure_tiny_model(workspace, progress)
    if name_or_path == "small":
        return ensure_small_model(workspace, progress)
    check_model(name_or_path)
    return _folder_of(name_or_path)


def check_model(name_or_path: str) -> None:
    """Raise ``SetUpError`` unless this is ``tiny``, ``small`` or a model's folder."""
    folder = _folder_of(name_or_path)
    if name_or_path not in ("tiny", "small") and not (folder / "config.json").is_file():
        raise SetUpError(f"no model at {folder}: expected tiny, small or a folder with config.json")


def _folder_of(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _ensure(recipe: ModelRecipe, workspace: Workspace, progress: Progress) -> Path:
    folder = workspace.models / recipe.name
    stamp = recipe_stamp(recipe.script, recipe.inputs)
    if is_stamped(folder / STAMP_NAME, stamp):
        return folder
    lock_path = workspace.models / f"{recipe.name}.lock"
    with exclusive(lock_path, deadline_seconds=BUILD_DEADLINE_SECONDS, progress=progress):
        if not is_stamped(folder / STAMP_NAME, stamp):
            _build(recipe, workspace, progress)
    progress(f"model {recipe.name}: ready")
    return folder


def _build(recipe: ModelRecipe, workspace: Workspace, progress: Progress) -> None:
    folder = workspace.models / recipe.name
    draft = workspace.models / f"{recipe.name}.new"
    shutil.rmtree(draft, ignore_errors=True)
    # -P: the script's own folder must not shadow modules of the engine environment.
    command = (
        *(str(workspace.engine_python), "-P", str(recipe.script)),
        *("--output", str(draft), *recipe.arguments),
    )
    runner = CommandRunner(
        log_path=workspace.logs / f"model-{recipe.name}.log",
        progress=progress,
        env=plain_environment(),
    )
    runner.run(f"model {recipe.name}: making it", command, deadline_seconds=BUILD_DEADLINE_SECONDS)
    (draft / STAMP_NAME).write_text(recipe_stamp(recipe.script, recipe.inputs), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
