"""The configuration that the documentation shows is one that kube-scheduler takes, as it is."""

import re
from pathlib import Path

import pytest

from nearkv.extender.settings import LimitSettings
from nearkv.scheduler_config.linting import lint
from nearkv.scheduler_config.sampling import sampled_nodes

PAGE = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def test_there_is_an_example():
    assert len(EXAMPLES) == 1


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_lint_has_nothing_to_say_about_it(text):
    report = lint(text)
    assert list(report.findings) == []
    assert report.behaviour


@pytest.mark.parametrize("nodes", [300, 1000, 5000, 15000])
def test_the_table_of_samples_is_right(nodes):
    (row,) = re.findall(rf"^\| {nodes:,} \| ([\d,]+)", PAGE, re.MULTILINE)
    assert int(row.replace(",", "")) == sampled_nodes(nodes, None)


def test_the_keepalive_is_the_one_told():
    assert f"`limits.keepalive_seconds`, {LimitSettings().keepalive_seconds:g} s" in PAGE
