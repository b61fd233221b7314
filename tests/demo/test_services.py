from dataclasses import dataclass
from pathlib import Path

import yaml

from nearkv.demo.services import AgentRole, agent_config, ingress_config, service_spec
from nearkv.demo.workspace import Workspace


@dataclass
class NamedEngine:
    name: str
    url: str = "http://127.0.0.1:8001"
    kv_events: str = "ipc:///sockets/kv-events"
    kv_replay: str = "ipc:///sockets/kv-replay"


def test_agent_watches_every_engine():
    config = agent_config(9000, [NamedEngine("engine-a"), NamedEngine("engine-b")], AgentRole())
    assert config["listen"] == "127.0.0.1:9000"
    assert config["engines"][1] == {
        "id": "engine-b",
        "url": "http://127.0.0.1:8001",
        "role": "both",
        "kv_events": "ipc:///sockets/kv-events",
        "kv_replay": "ipc:///sockets/kv-replay",
    }


def test_component_reads_the_file_written_for_it(tmp_path):
    config = ingress_config(9001, policy="round-robin", agent_urls=["http://127.0.0.1:9000"])
    spec = service_spec(
        "ingress", name="ingress-round-robin", config=config, workspace=Workspace(tmp_path)
    )
    assert spec.command[1:4] == ("-m", "nearkv.ingress", "--config")
    assert yaml.safe_load(Path(spec.command[4]).read_text()) == config


def test_an_agent_with_a_socket_moves_kv(tmp_path):
    role = AgentRole(node="node-a", engine_role="prefill", socket_dir=tmp_path)
    config = agent_config(9000, [NamedEngine("engine-a")], role)
    assert config["node"] == "node-a"
    assert config["engines"][0]["role"] == "prefill"
    assert config["transfer"]["socket_dir"] == str(tmp_path)
    assert "transfer" not in agent_config(9000, [], AgentRole())
