from dataclasses import dataclass
from pathlib import Path

import yaml

from nearkv.demo.services import agent_config, ingress_config, service_spec
from nearkv.demo.workspace import Workspace


@dataclass
class NamedEngine:
    name: str
    url: str = "http://127.0.0.1:8001"
    kv_events: str = "ipc:///sockets/kv-events"
    kv_replay: str = "ipc:///sockets/kv-replay"


def test_agent_watches_every_engine():
    config = agent_config(9000, [NamedEngine("engine-a"), NamedEngine("engine-b")])
    assert config["listen"] == "127.0.0.1:9000"
    assert config["engines"][1] == {
        "id": "engine-b",
        "url": "http://127.0.0.1:8001",
        "kv_events": "ipc:///sockets/kv-events",
        "kv_replay": "ipc:///sockets/kv-replay",
    }


def test_component_reads_the_file_written_for_it(tmp_path):
    config = ingress_config(9001, policy="round-robin", agent_url="http://127.0.0.1:9000")
    spec = service_spec(
        "ingress", name="ingress-round-robin", config=config, workspace=Workspace(tmp_path)
    )
    assert spec.command[1:4] == ("-m", "nearkv.ingress", "--config")
    assert yaml.safe_load(Path(spec.command[4]).read_text()) == config
