"""The double as a process of its own."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.doubles.engine.__main__ import parse_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def process():
    command = [sys.executable, "-m", "tests.doubles.engine", "--dp-size", "2", "--model", "m"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_prints_its_addresses_serves_and_stops_on_a_signal(process):
    addresses = json.loads(process.stdout.readline())
    with urllib.request.urlopen(addresses["url"] + "/v1/models", timeout=30) as response:  # noqa: S310 - our own loopback address
        assert json.load(response)["data"][0]["id"] == "m"
    assert addresses["kv_events"].startswith("tcp://127.0.0.1:")
    assert len(addresses["kv_replay_by_rank"]) == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(40) == 0


def test_options_are_the_fields_of_the_configuration():
    config = parse_config(
        [
            "--event-encoding",
            "array",
            "--no-scale-out",
            "--max-model-len",
            "64",
            "--missing-metrics",
            "a",
            "b",
        ]
    )
    assert (config.event_encoding, config.scale_out, config.context_tokens) == ("array", False, 64)
    assert config.missing_metrics == {"a", "b"}
    assert parse_config([]).context_tokens == 8192
