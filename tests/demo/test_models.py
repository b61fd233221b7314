import pytest

from nearkv.demo.engine_env import STAMP_NAME
from nearkv.demo.errors import SetUpError
from nearkv.demo.models import (
    check_model,
    ensure_model,
    ensure_tiny_model,
    recipe_stamp,
    tiny_recipe,
)
from nearkv.demo.workspace import Workspace


def test_stamp_depends_on_script_and_inputs(tmp_path):
    script, text = tmp_path / "script", tmp_path / "text"
    script.write_text("a")
    text.write_text("b")
    stamp = recipe_stamp(script, [text])
    text.write_text("c")
    assert recipe_stamp(script, [text]) != stamp


def test_stamped_model_is_not_made_again(tmp_path):
    workspace = Workspace(tmp_path)
    recipe = tiny_recipe(workspace)
    folder = workspace.models / "tiny"
    folder.mkdir(parents=True)
    (folder / STAMP_NAME).write_text(recipe_stamp(recipe.script, recipe.inputs))
    assert ensure_tiny_model(workspace) == folder


def test_folder_with_a_configuration_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert ensure_model(str(tmp_path), Workspace(tmp_path)) == tmp_path


def test_other_folder_is_refused_with_its_path(tmp_path):
    with pytest.raises(SetUpError, match=str(tmp_path)):
        ensure_model(str(tmp_path), Workspace(tmp_path))


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_own_models_need_no_folder_yet(name):
    check_model(name)


def test_model_that_cannot_be_made_leaves_no_folder(tmp_path):
    workspace = Workspace(tmp_path)
    workspace.engine_python.parent.mkdir(parents=True)
    workspace.engine_python.write_text("#!/bin/sh\necho no torch here >&2\nexit 3\n")
    workspace.engine_python.chmod(0o755)
    with pytest.raises(SetUpError, match=r"(?s)failed with status 3.*no torch here"):
        ensure_tiny_model(workspace)
    assert not (workspace.models / "tiny").exists()
