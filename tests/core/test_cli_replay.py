"""``nearkv replay`` as its users run it."""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import struct
import sys
import termios
from html.parser import HTMLParser

import pytest
from PIL import Image

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


async def test_a_terminal_shows_how_far_each_policy_is(trace):
    seen, shown = os.openpty()
    fcntl.ioctl(shown, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nearkv.cli", "replay", str(trace), "--engines", "2"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=shown,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(shown)
    told = await asyncio.to_thread(_read_all, seen)
    assert await asyncio.wait_for(program.wait(), 30) == 0
    for policy in ("cost", "least-loaded"):
        assert re.search(rf"{policy} .*30/30", told), told


def _read_all(descriptor):
    """Read a terminal until nobody has it open any more, which is an error to Linux."""
    parts = []
    with open(descriptor, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # noqa: PTH123 (a descriptor has no path)
        while part := terminal.read(1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


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


async def test_drawings_may_be_one_picture(trace, tmp_path):
    path = tmp_path / "page.PNG"
    status, _, err = await run_cli("replay", str(trace), "--engines", "2", "--plot", str(path))
    assert (status, err) == (0, "")
    with Image.open(path) as image:
        image.load()
        colours = {colour for _, colour in image.getcolors(1 << 20)}
    assert image.format == "PNG"
    assert {(0x25, 0x63, 0xEB), (0xDC, 0x26, 0x26)} <= colours  # one for each policy


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
        (("--plot", "page.pdf"), "--plot: page.pdf is neither FILE.html nor FILE.png"),
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
