"""``nearkv doctor transfer``: the real host, agents' statuses, JSON and exit status."""

import json
import socket
import tempfile
from pathlib import Path

import pytest
from aiohttp import web

from nearkv.cli.doctor_checks import Verdict, check_agent_socket
from nearkv.cli.doctor_pairs import judge_pairs, read_node
from nearkv.cli.doctor_probes import probe_all, probe_backend
from nearkv.serving import running
from nearkv.settings import Address
from tests.core.running_cli import run_cli

TOKEN = "s3cret"  # noqa: S105 - guards nothing but the server of these tests


def probe(name, *, usable=True):
    return {"name": name, "usable": usable, "rdma": False, "detail": ""}


def pair(source, target, path, pulls=1):
    return {
        "source": source,
        "target": target,
        "path": path,
        "rdma": False,
        "detail": "",
        "pulls": pulls,
        "bytes": 10,
        "failures": {},
        "setup_seconds": 0.001,
        "bytes_per_second": 2e9,
        "measured": True,
    }


def agent(node, transfer):
    return {"component": "agent", "node": node, "engines": [], "transfer": transfer}


ONE = agent(
    "n1",
    {
        "paths": [probe("tcp"), probe("ucx"), probe("nixl", usable=False)],
        "pairs": [pair("n1", "n1", "tcp"), pair("n2", "n1", "ucx")],
    },
)
TWO = agent(
    "n2",
    {
        "paths": [probe("tcp"), probe("ucx"), probe("nixl")],
        "pairs": [pair("n1", "n2", "tcp"), pair("n2", "n2", "cuda")],
    },
)
OFF = agent("n3", None)
BROKEN = agent("n4", {"paths": 3})


@pytest.fixture
async def served():
    documents = {"one": ONE, "two": TWO, "off": OFF, "broken": BROKEN}

    async def status(request):
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401)
        return web.json_response(documents[request.match_info["name"]])

    app = web.Application()
    app.router.add_get("/{name}/v1/status", status)
    async with running(app, Address("127.0.0.1", 0)) as address:
        yield address.url


@pytest.fixture
def short_folder():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def judged(*documents):
    rows = judge_pairs([read_node(document, "url") for document in documents])
    return {(row.source, row.target): row for row in rows}


def test_the_first_path_that_works_on_both_nodes_is_expected():
    row = judged(ONE, TWO)["n2", "n1"]
    assert (row.expected, row.used, row.verdict) == ("ucx", "ucx", Verdict.OK)
    assert row.why == "nixl not usable at n1; ucx works on both, without RDMA"
    assert row.bytes_per_second == 2e9


def test_another_path_than_the_expected_one_is_a_warning():
    row = judged(ONE, TWO)["n1", "n2"]
    assert (row.expected, row.used, row.verdict) == ("ucx", "tcp", Verdict.WARN)


def test_a_pull_within_a_node_that_left_shared_memory_is_a_warning():
    rows = judged(ONE, TWO)
    assert (rows["n1", "n1"].expected, rows["n1", "n1"].verdict) == ("shm", Verdict.WARN)
    assert rows["n2", "n2"].verdict is Verdict.OK


def test_a_pair_without_pulls_was_never_used():
    idle = agent("a", {"paths": [], "pairs": [pair("a", "a", "tcp", pulls=0)]})
    row = judged(idle)["a", "a"]
    assert (row.used, row.verdict) == (None, Verdict.OK)


def test_no_path_says_who_lacks_what():
    bare = agent("bare", {"paths": [probe("tcp", usable=False)], "pairs": []})
    rows = judged(ONE, bare, OFF)
    assert (rows["n1", "bare"].expected, rows["n1", "bare"].verdict) == ("", Verdict.WARN)
    assert "tcp not usable at bare" in rows["n1", "bare"].why
    assert rows["n1", "n3"].why == "transfer is off at n3"


def test_a_status_without_a_transfer_section_is_one_that_is_off():
    assert read_node({"component": "agent"}, "http://a").name == "http://a"
    assert read_node({"component": "agent"}, "http://a").transfer is None


async def test_json_holds_the_host_and_the_pairs(served, short_folder):
    code, out, err = await run_cli(
        *("doctor", "transfer", "-o", "json", "--socket-dir", str(short_folder)),
        *("--agent", f"{served}/one", "--agent", f"{served}/two"),
        NEARKV_TOKEN=TOKEN,
    )
    document = json.loads(out)
    assert (code, err) == (0, "")
    checks = {row["check"]: row for row in document["checks"]}
    assert set(document) == {"checks", "pairs"}
    assert all(set(row) == {"check", "verdict", "finding", "advice"} for row in checks.values())
    assert checks["memfd"]["verdict"] == "ok"
    assert checks["transport tcp"]["verdict"] == "ok"
    assert checks["agent"]["verdict"] == "warn"
    assert checks["namespaces"]["finding"].startswith("pid:[")
    assert {"huge pages", "copying", "memlock", "rdma", "affinity"} < set(checks)
    assert {"transport ucx", "transport nixl"} < set(checks)
    assert [(row["source"], row["target"], row["verdict"]) for row in document["pairs"]] == [
        ("n1", "n1", "warn"),
        ("n1", "n2", "warn"),
        ("n2", "n1", "ok"),
        ("n2", "n2", "ok"),
    ]


async def test_the_table_shows_the_same_and_a_bad_agent_fails(served, short_folder):
    code, out, _ = await run_cli(
        *("doctor", "transfer", "--socket-dir", str(short_folder), "--token", TOKEN),
        NEARKV_AGENTS=f"{served}/one, {served}/broken",
    )
    assert code == 1
    assert out.startswith("CHECK")
    assert "does not exist" in out
    assert "its transfer section cannot be read" in out
    assert "\x1b" not in out


def test_an_agents_socket_is_tried(short_folder):
    path = short_folder / "agent.sock"
    assert check_agent_socket(short_folder).verdict is Verdict.WARN
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        assert check_agent_socket(short_folder).verdict is Verdict.OK
    assert check_agent_socket(short_folder).verdict is Verdict.FAIL


async def test_transports_are_really_probed():
    rows = {row.check: row for row in await probe_all()}
    assert list(rows) == ["transport tcp", "transport ucx", "transport nixl"]
    assert rows["transport tcp"].finding == "sockets, no TLS"
    # Whether installed or not, none of them may be reported as crashed for how it ends.
    assert not [row for row in rows.values() if "killed by" in row.finding]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param("import os\nos.abort()", "killed by SIGABRT", id="crash"),
        pytest.param("import signal\nsignal.pause()", "no answer within", id="hang"),
        pytest.param("raise ImportError('libx.so is missing')", "libx.so is missing", id="raises"),
        pytest.param("class Backend: pass", "no attribute 'probe'", id="no-probe"),
    ],
)
async def test_a_library_that_misbehaves_is_not_usable(tmp_path, monkeypatch, body, expected):
    (tmp_path / "misbehaving.py").write_text(body, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # The hanging one is the only one that waits for this deadline.
    deadline = 3.0 if "pause" in body else 30.0
    row = await probe_backend("x", "misbehaving", "Backend", timeout_seconds=deadline)
    assert row.verdict is Verdict.WARN
    assert row.finding.startswith("not usable")
    assert expected in row.finding
