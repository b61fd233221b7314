"""``nearkv explain-pod``: the table, JSON, and what is said when there is no answer."""

import json

import pytest

from nearkv.cli.explain_table import Explanation, NodeScore, PodDecision, render_explanation
from tests.core.running_cli import run_cli
from tests.extender.tls_files import HAS_OPENSSL, make_pair
from tests.integration.extender_site import question, running_extender, small_cluster

NAMES = [f"gpu-0000{i}" for i in range(4)]
TOKEN = "not-a-real-one"  # noqa: S105 (it guards nothing)


@pytest.fixture
async def extender():
    async with running_extender(small_cluster(**{"gpu-00001": {"free": (0.1,) * 8}})) as running:
        await running.post("filter", question(NAMES))
        await running.scores(question(["gpu-00000", "gpu-00002", "gpu-00003"]))
        yield running


async def test_the_table(extender):
    code, out, err = await run_cli("explain-pod", "default/decode-1", "--extender", extender.url)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "default/decode-1  uid u1"
    heading = next(i for i, line in enumerate(lines) if "NODE" in line)
    assert lines[heading].split()[:4] == ["NODE", "SCORE", "CLASS", "FETCH"]
    best = lines[heading + 1].split()
    assert best[0] == "gpu-00000"
    assert best[2] == "same-node"
    rejected = next(line for line in lines if "gpu-00001" in line)
    assert lines.index(rejected) > heading
    assert any("kept 3 of 4 nodes" in line for line in lines)


async def test_json_is_the_extender_s_own(extender):
    code, out, _ = await run_cli(
        *("explain-pod", "default/decode-1", "-o", "json", "--limit", "1"),
        NEARKV_EXTENDER=extender.url.removeprefix("http://"),
    )
    assert code == 0
    found = json.loads(out)
    assert [decision["verb"] for decision in found["decisions"]] == ["prioritize", "filter"]
    assert len(found["decisions"][0]["scores"]) == 1


async def test_a_pod_that_is_not_known(extender):
    code, out, err = await run_cli("explain-pod", "default/other", "--extender", extender.url)
    assert (code, out) == (1, "")
    assert "no decision about default/other" in err


async def test_the_token():
    async with running_extender(small_cluster(), admin_token=TOKEN) as extender:
        await extender.scores(question(NAMES))
        ask = ("explain-pod", "default/decode-1", "--extender", extender.url)
        code, _, err = await run_cli(*ask)
        assert code == 1
        assert "--token" in err
        assert (await run_cli(*ask, NEARKV_TOKEN=TOKEN))[0] == 0


@pytest.mark.skipif(not HAS_OPENSSL, reason="the openssl program is not installed")
async def test_a_private_ca(tmp_path):
    pair = make_pair(tmp_path, "extender")
    tls = {"cert": str(pair.cert), "key": str(pair.key)}
    async with running_extender(small_cluster(), tls=tls) as extender:
        ask = ("explain-pod", "default/decode-1", "--extender", extender.url)
        assert (await run_cli(*ask))[0] == 1
        code, _, err = await run_cli(*ask, "--ca", str(pair.cert))
        assert (code, "no decision" in err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        pytest.param(("default/x",), 2, "NEARKV_EXTENDER", id="no-extender"),
        pytest.param(("x", "--extender", "a:1"), 2, "NAMESPACE/NAME", id="no-namespace"),
        pytest.param(("a/b", "--extender", "ftp://a"), 1, "not an HTTP URL", id="no-url"),
        pytest.param(("a/b", "--extender", "127.0.0.1:1"), 1, "cannot connect", id="nobody-there"),
        pytest.param(
            ("a/b", "--extender", "https://a:1", "--ca", "/nowhere"),
            2,
            "--ca, --cert, --key: tls: /nowhere: No such file",
            id="no-ca",
        ),
    ],
)
async def test_questions_that_cannot_be_asked(arguments, code, says):
    got, out, err = await run_cli("explain-pod", *arguments)
    assert (got, out) == (code, "")
    assert says in err
    assert "Traceback" not in err


def test_what_is_not_known_is_a_dash():
    bare = Explanation(decisions=(PodDecision(verb="prioritize", scores=(NodeScore(node="n"),)),))
    lines = render_explanation(bare).splitlines()
    assert lines[-1].split() == ["n", "-", "-", "-", "-", "-", "-", "-"]
