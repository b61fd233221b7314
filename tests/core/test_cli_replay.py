"""``nearkv replay`` as its users run it."""

import json
from html.parser import HTMLParser

import pytest

from tests.core.replay.fleets import public_line, record_line
from tests.core.running_cli import run_cli


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        public_line(timestamp=n * 500, input_length=2100, hash_ids=[n % 3, 1, 2, 3, n])
        for n in range(30)
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


async def test_the_table_has_a_row_for_each_variant(trace):
    sets = ("--set", "cost.crowding_weight=0,1", "--policy", "cost", "--policy", "random")
    status, out, err = await run_cli("replay", str(trace), "--engines", "3", *sets)
    assert (status, err) == (0, "")
    header, *rows = out.splitlines()
    assert header.split()[:3] == ["POLICY", "HIT", "RATE"]
    assert [row.split("  ")[0] for row in rows] == [
        "cost crowding_weight=0",
        "cost crowding_weight=1",
        "random",
    ]


async def test_json_has_every_seed_and_the_same_run_gives_the_same(trace):
    arguments = ("replay", str(trace), "--engines", "3", "--seeds", "2", "-o", "json")
    status, out, _ = await run_cli(*arguments)
    assert status == 0
    assert (await run_cli(*arguments))[1] == out
    cost, least_loaded = json.loads(out)
    assert len(cost["by_seed"]) == 2
    assert cost["figures"]["hit_ratio"] > least_loaded["figures"]["hit_ratio"]
    assert cost["figures"]["requests"] == 60


async def test_drawings_are_one_page_by_itself(trace, tmp_path):
    page = tmp_path / "page.html"
    status, _, err = await run_cli("replay", str(trace), "--engines", "2", "--plot", str(page))
    assert (status, err) == (0, "")
    text = page.read_text()
    HTMLParser().feed(text)
    assert text.count("<svg") == text.count("</svg>") >= 7
    assert "polyline" in text
    assert "src=" not in text
    assert "least-loaded" in text


async def test_prefill_engines_split_requests(trace):
    options = ("--engines", "3", "--prefill-engines", "1", "--set", "pd.mode=always")
    status, out, _ = await run_cli("replay", str(trace), *options, "--policy", "cost", "-o", "json")
    assert status == 0
    assert json.loads(out)[0]["figures"]["split"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--preset", "tpu"), "--preset: 'tpu' is none of"),
        (("--prefill-engines", "16"), "--prefill-engines"),
        (("--policy", "best"), "--policy: 'best'"),
        (("--link", "what"), "--link"),
        (("--plot", "/nowhere/page.html"), "--plot: cannot write"),
    ],
)
async def test_mistakes_name_the_option(trace, options, said):
    status, out, err = await run_cli("replay", str(trace), *options)
    assert (status, out) == (2, "")
    assert said in err


async def test_records_without_keys_say_what_to_switch_on(tmp_path):
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(record_line(hash_ids=None))
    status, _, err = await run_cli("replay", str(path))
    assert status == 2
    assert "decisions.keys: true" in err
