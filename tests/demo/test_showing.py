"""The whole show on engine doubles, with the real agent and the real ingress."""

import asyncio
import io
import re
import time
from pathlib import Path

import aiohttp
import msgspec
import pytest
from rich.console import Console

from nearkv.demo.rendering import Screen
from nearkv.demo.showing import Show, ShowOptions
from nearkv.demo.stage import EngineKind
from nearkv.demo.workspace import Workspace

CHECKOUT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 40.0


@pytest.fixture
def workspace(tmp_path):
    """A checkout of its own, so that a demonstration that runs beside the tests keeps its logs."""
    (tmp_path / "tests").symlink_to(CHECKOUT / "tests")
    return Workspace(tmp_path)


def show(workspace, text, **changes):
    options = {
        "engine": EngineKind.DOUBLE,
        "model_dir": None,
        "compare": False,
        "rounds": 3,
        "port": None,
        "keep_serving": False,
    }
    options = ShowOptions(**{**options, **changes})
    return Show(options, workspace, Screen(Console(file=text, width=120)))


async def text_with(text, phrase):
    end = time.monotonic() + DEADLINE_SECONDS
    while phrase not in text.getvalue():
        assert time.monotonic() < end, text.getvalue()
        await asyncio.sleep(0.05)
    return text.getvalue()


async def test_scenario_passes_predictions_are_right_and_other_policies_compute_more(workspace):
    text = io.StringIO()
    outcome = await show(workspace, text, compare=True).run()
    assert outcome.passed, text.getvalue()
    assert "predicted cached tokens were right in 6 of 6 requests" in text.getvalue()
    assert msgspec.json.decode(workspace.report.read_bytes())["passed"] is True
    reductions = {
        policy["policy"]: policy["documents"][0]["reduction_ratio"]
        for policy in outcome.report["policies"]
    }
    assert list(reductions) == ["prefix-first", "cost", "round-robin", "least-loaded"]
    assert reductions["cost"] > reductions["round-robin"]


async def test_serving_goes_on_until_it_is_interrupted(workspace):
    text = io.StringIO()
    task = asyncio.ensure_future(show(workspace, text, rounds=2, keep_serving=True).run())
    try:
        shown = await text_with(text, "Ctrl-C stops everything")
        url = re.search(r"http://127\.0\.0\.1:\d+", shown)[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/v1/models") as response:
                assert response.status == 200
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.get(f"{url}/v1/models")
    finally:
        task.cancel()
