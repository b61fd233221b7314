"""Dashboards ask for series that exist, by labels that they have, in queries that can be read."""

import json
import re

import pytest
import yaml

from nearkv.cli.document_metrics import list_series
from tests.deploy.chart import CHART
from tests.deploy.series import exported_names, names_in
from tests.deploy.tools import promtool, run

FILES = sorted((CHART / "files" / "dashboards").glob("*.json"))
BOARDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
EACH = pytest.mark.parametrize("name", BOARDS)
TARGET_LABELS = {"pod", "node", "instance", "namespace", "job", "model_name", "le"}
"""Those that Prometheus adds, and vLLM's."""
LABELS = {label for listed in list_series().values() for each in listed for label in each.labels}


def panels(board):
    """Return the panels that show something."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(board):
    """Return all queries, Grafana's variables put in."""
    return [
        target["expr"].replace("$__rate_interval", "5m")
        for panel in panels(board)
        for target in panel["targets"]
    ]


def test_there_are_four():
    assert sorted(BOARDS) == ["nodes", "overview", "routing", "transfer"]


@EACH
def test_every_query_names_series_that_are_exported(name):
    for query in queries(BOARDS[name]):
        names = names_in(query)
        assert names, query
        assert names <= exported_names(), query


@EACH
def test_every_label_in_a_query_exists(name):
    for query in queries(BOARDS[name]):
        grouped = re.findall(r"(?:by|without|ignoring|on) \(([^)]*)\)", query)
        matched = re.findall(r"[{,]\s*(\w+)\s*(?:=|!)", query)
        used = {label.strip() for part in grouped for label in part.split(",")} | set(matched)
        assert used <= LABELS | TARGET_LABELS, query


@EACH
def test_prometheus_can_read_every_query(tmp_path, name):
    rules = [
        {"record": f"query_{number}", "expr": query}
        for number, query in enumerate(queries(BOARDS[name]))
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": name, "rules": rules}]}))
    done = run(promtool(), "check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


@EACH
def test_legends_show_labels_that_the_query_keeps(name):
    for panel in panels(BOARDS[name]):
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                kept = re.findall(r"by \(([^)]*)\)", target["expr"])
                assert label in LABELS | TARGET_LABELS
                assert not kept or label in re.split(r",\s*", kept[0]), target["expr"]


@EACH
def test_panels_have_titles_units_and_a_place_of_their_own(name):
    taken = set()
    for panel in BOARDS[name]["panels"]:
        assert panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        taken |= cells
    for panel in panels(BOARDS[name]):
        assert panel["fieldConfig"]["defaults"]["unit"]
    ids = [panel["id"] for panel in BOARDS[name]["panels"]]
    assert len(ids) == len(set(ids))


@EACH
def test_the_data_source_can_be_chosen(name):
    board = BOARDS[name]
    assert board["uid"] == f"nearkv-{name}"
    (variable,) = board["templating"]["list"]
    assert variable["type"] == "datasource"
    for panel in panels(board):
        assert panel["datasource"]["uid"] == f"${{{variable['name']}}}"


def test_the_chart_hands_them_to_grafanas_sidecar(rendered):
    handed = {}
    for each in rendered("rdma").kinds("ConfigMap"):
        if each["metadata"]["labels"].get("grafana_dashboard") == "1":
            handed |= {key: json.loads(text) for key, text in each["data"].items()}
    assert handed == {f"nearkv-{name}.json": board for name, board in BOARDS.items()}


def test_there_is_none_unless_asked_for(rendered):
    kinds = {each["kind"] for each in rendered("default").objects}
    assert not kinds & {"PrometheusRule", "ServiceMonitor", "PodMonitor"}
    assert all(
        "grafana_dashboard" not in m["metadata"]["labels"]
        for m in rendered("default").kinds("ConfigMap")
    )
