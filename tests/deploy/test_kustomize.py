"""kustomize gives the same objects as the chart."""

import re

import pytest

from tests.deploy.chart import read_yaml
from tests.deploy.kustomize import (
    BASE_PROFILE,
    KUSTOMIZE,
    OVERLAYS,
    key_of,
    kustomize_files,
    objects_of,
)
from tests.deploy.tools import kubectl, run


def test_the_files_are_up_to_date():
    wanted = kustomize_files()
    there = {path: path.read_text(encoding="utf-8") for path in KUSTOMIZE.rglob("*.yaml")}
    assert there == wanted, "run `make render`"


@pytest.mark.parametrize("name", [BASE_PROFILE, *OVERLAYS])
def test_the_objects_are_those_of_the_chart(name):
    folder = "base" if name == BASE_PROFILE else f"overlays/{name}"
    done = run(kubectl(), "kustomize", str(KUSTOMIZE / folder))
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    built = {key_of(each): each for each in read_yaml(done.stdout)}
    wanted = objects_of(name)
    assert built.keys() == wanted.keys()
    for key, value in wanted.items():
        assert built[key] == value, key


def test_no_secret_is_among_them():
    for path, text in kustomize_files().items():
        assert not re.search(r"^kind: Secret$", text, re.MULTILINE), path
