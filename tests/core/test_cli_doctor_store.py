"""``nearkv doctor transfer`` and the shared store: tried where the agent's settings name one."""

import json
import socket

import pytest

from nearkv.cli.doctor_checks import Verdict
from nearkv.cli.doctor_store import check_store, judge_stores
from nearkv.cli.fetching import Answer, Endpoint
from tests.core.running_cli import run_cli


@pytest.fixture
def config(tmp_path):
    def write(url):
        path = tmp_path / "agent.yaml"
        path.write_text(f"transfer: {{store: {{url: '{url}'}}}}\n", encoding="utf-8")
        return path

    return write


def test_without_settings_nothing_is_said():
    assert check_store(None, {}) == []


def test_without_a_store_nothing_is_said(tmp_path):
    path = tmp_path / "agent.yaml"
    path.write_text("node: n1\n", encoding="utf-8")
    assert check_store(path, {}) == []


def test_a_folder_that_works(config, tmp_path):
    (row,) = check_store(config(f"file://{tmp_path / 'kv'}"), {})
    assert (row.verdict, row.advice) == (Verdict.OK, "")
    assert "there and back" in row.finding


def test_the_environment_may_name_the_store(tmp_path):
    url = f"file://{tmp_path / 'kv'}"
    (row,) = check_store(None, {"NEARKV_AGENT_TRANSFER__STORE__URL": url})
    assert row.verdict is Verdict.OK


def test_a_folder_that_others_may_write_into(config, tmp_path):
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(0o777)
    (row,) = check_store(config(f"file://{folder}"), {})
    assert row.verdict is Verdict.FAIL
    assert "may write into it" in row.finding
    assert "flock" in row.advice


def test_a_server_that_is_not_there_and_whose_password_is_not_shown(config):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        (row,) = check_store(config(f"redis://:hush@127.0.0.1:{nobody.getsockname()[1]}/0"), {})
    assert row.verdict is Verdict.FAIL
    assert "no_path" in row.finding
    assert "hush" not in str(row)


def test_a_server_that_is_silent_ends_by_the_deadline(config):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        (row,) = check_store(config(url), {}, seconds=0.2)
    assert row.verdict is Verdict.FAIL
    assert "deadline" in row.finding


def test_settings_that_are_wrong_are_named(config):
    (row,) = check_store(config("s3://hush"), {})
    assert row.verdict is Verdict.FAIL
    assert "transfer.store.url" in row.finding
    assert "hush" not in row.finding


def answer(store):
    endpoint = Endpoint("agent", "http://n1:9470")
    return Answer(endpoint=endpoint, document={"transfer": {"store": store}})


@pytest.mark.parametrize(
    ("usable", "verdict"), [(True, Verdict.OK), (False, Verdict.FAIL), (None, Verdict.INFO)]
)
def test_what_agents_say_of_their_stores(usable, verdict):
    store = {"tier": "redis", "url": "redis://h", "usable": usable, "why": "", "hits": 3, "puts": 2}
    (row,) = judge_stores([answer(store)])
    assert row.verdict is verdict
    assert row.check == "store of http://n1:9470"
    assert "3 hits, 2 puts" in row.finding


@pytest.mark.parametrize("store", [None, 3, "x"])
def test_agents_without_a_store_have_no_row(store):
    assert judge_stores([answer(store)]) == []


async def test_the_command_takes_the_agents_settings(config, tmp_path):
    path = config(f"file://{tmp_path / 'kv'}")
    _, out, _ = await run_cli("doctor", "transfer", "--config", str(path), "-o", "json")
    rows = {row["check"]: row["verdict"] for row in json.loads(out)["checks"]}
    assert rows["store"] == "ok"
