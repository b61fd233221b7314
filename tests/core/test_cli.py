"""The command line: quick help, usage errors, and ``nearkv config``."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import yaml

from nearkv._version import __version__
from nearkv.cli.document_settings import render_document
from tests.core.running_cli import run_cli

HEAVY = ("pydantic", "aiohttp", "structlog", "prometheus_client", "rich", "yaml", "msgspec")
CONFIGURATION = Path(__file__).parents[2] / "docs" / "configuration.md"


async def test_help_imports_nothing_heavy():
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "importtime", "-m", "nearkv.cli", "--help"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, imports = await asyncio.wait_for(program.communicate(), 30)
    imported = {line.rpartition("|")[2].strip() for line in imports.decode().splitlines()}
    assert b"status" in out
    assert "typer" in imported
    assert imported.isdisjoint(HEAVY)


@pytest.mark.parametrize("spelled", ["version", "--version"])
async def test_version(spelled):
    assert await run_cli(spelled) == (0, f"nearkv {__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("stats",), id="unknown-verb"),
        pytest.param(("status", "--agnt", "x"), id="unknown-option"),
        pytest.param(("status", "-o", "xml"), id="unknown-form"),
        pytest.param(("config", "router"), id="unknown-component"),
        pytest.param(("plan", "--model", "/nowhere"), id="no-such-model"),
        pytest.param(("config", "agent", "--nod", "x"), id="unknown-setting"),
        pytest.param(("config", "agent", "--config", "/nowhere.yaml"), id="no-such-file"),
    ],
)
async def test_usage_errors(arguments):
    code, out, err = await run_cli(*arguments)
    assert (code, out) == (2, "")
    assert err
    assert "Traceback" not in err


async def test_config_prints_effective_settings_with_sources(tmp_path):
    path = tmp_path / "agent.yaml"
    path.write_text("drain_seconds: 7\n", encoding="utf-8")
    code, out, _ = await run_cli(
        *("config", "agent", "--config", str(path), "--log-level", "debug"),
        NEARKV_AGENT_NODE="n1",
    )
    settings = yaml.safe_load(out)
    assert code == 0
    assert (settings["drain_seconds"], settings["log_level"]) == (7, "debug")
    assert "node: n1  # env NEARKV_AGENT_NODE" in out
    assert "drain_seconds: 7.0  # file" in out


async def test_config_prints_the_schema():
    code, out, _ = await run_cli("config", "agent", "--schema")
    assert code == 0
    assert json.loads(out)["additionalProperties"] is False


def test_the_configuration_page_is_up_to_date():
    assert CONFIGURATION.read_text(encoding="utf-8") == render_document()
