"""Each alert fires when it should and not otherwise, names series that exist, and has a page."""

import re

import pytest
import yaml

from tests.deploy.chart import CHART, ROOT, profile, render
from tests.deploy.series import exported_names, names_in
from tests.deploy.tools import promtool, run

FILE = CHART / "files" / "alerts.yaml"
CASES = ROOT / "tests" / "deploy" / "alerts"
RUNBOOKS = ROOT / "docs" / "runbooks"
GROUPS = yaml.safe_load(FILE.read_text(encoding="utf-8"))["groups"]
RULES = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
EACH = pytest.mark.parametrize("name", sorted(RULES))


@EACH
def test_the_rule_fires_and_keeps_quiet(tmp_path, name):
    # Texts are left out: promtool would compare them word by word.
    bare = [{**rule, "annotations": {}} for rule in RULES.values()]
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": bare}]}))
    case = yaml.safe_load((CASES / f"{name}.yaml").read_text(encoding="utf-8"))
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], **case}))
    done = run(promtool(), "test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


@EACH
def test_the_case_has_both_sides(name):
    case = yaml.safe_load((CASES / f"{name}.yaml").read_text(encoding="utf-8"))
    expected = [bool(test["alert_rule_test"][0]["exp_alerts"]) for test in case["tests"]]
    assert sorted(expected) == [False, True]
    for test in case["tests"]:
        for series in test["input_series"]:
            assert names_in(series["series"]) & names_in(RULES[name]["expr"])


def test_promtool_takes_the_file(tmp_path):
    done = run(promtool(), "check", "rules", "--lint=all", "--lint-fatal", str(FILE))
    assert done.returncode == 0, done.stdout + done.stderr
    broken = tmp_path / "broken.yaml"
    broken.write_text(FILE.read_text(encoding="utf-8").replace("{{ $value", "{{ $valve", 1))
    assert run(promtool(), "check", "rules", str(broken)).returncode != 0


@EACH
def test_its_series_are_exported(name):
    names = names_in(RULES[name]["expr"])
    assert names
    assert names <= exported_names()


@EACH
def test_it_says_what_is_wrong_and_where_to_read_on(name):
    rule = RULES[name]
    assert re.fullmatch(r"Nearkv[A-Z][A-Za-z]+", name)
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"


@EACH
def test_its_page_tells_meaning_and_remedy(name):
    page = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {name}\n")
    assert f"```promql\n{RULES[name]['expr'].strip()}\n```" in page
    for heading in ("## What it means\n", "## Look\n", "## Do\n"):
        assert heading in page
    for series in names_in(page) - names_in("nearkv_agent_transfer_ nearkv_agent_gpu_"):
        assert series in exported_names(), series


def test_there_are_no_pages_and_cases_without_a_rule():
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == set(RULES)
    assert {path.stem for path in CASES.glob("*.yaml")} == set(RULES)
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[(\w+)\]", page, re.MULTILINE) == list(RULES)
    assert f"\n{len(RULES)} rules, in " in page


@pytest.mark.parametrize("page", ["alerts.md", "install.md", *(f"runbooks/{n}.md" for n in RULES)])
def test_links_between_pages_lead_somewhere(page):
    file = ROOT / "docs" / page
    text = file.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (file.parent / target).exists(), target


def test_the_chart_hands_the_rules_over_with_its_own_base_of_pages():
    monitoring = {"rules": {"enabled": True}, "runbookBaseUrl": "https://wiki.example.com/nearkv/"}
    made = render(profile("base") | {"monitoring": monitoring})
    (rule,) = made.kinds("PrometheusRule")
    handed = {each["alert"]: each for group in rule["spec"]["groups"] for each in group["rules"]}
    assert handed.keys() == RULES.keys()
    for name, each in handed.items():
        wanted = f"https://wiki.example.com/nearkv/{name}.md"
        assert each["annotations"].pop("runbook_url") == wanted
        ours = {**RULES[name], "annotations": {**RULES[name]["annotations"]}}
        ours["annotations"].pop("runbook_url")
        assert each == ours


def test_without_an_extender_nobody_misses_it():
    values = profile("base") | {"monitoring": {"rules": {"enabled": True}}}
    values |= {"extender": {"enabled": False}, "scheduler": {"enabled": False}}
    (rule,) = render(values).kinds("PrometheusRule")
    assert "nearkv-extender" not in {group["name"] for group in rule["spec"]["groups"]}
