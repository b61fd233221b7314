"""When the agent looks for pods by itself, and how it learns its node's name."""

import pytest

from nearkv.agent.kubernetes.surroundings import complete_settings
from nearkv.agent.settings import AgentSettings
from nearkv.settings import load_settings

IN_POD = {"NODE_NAME": "gpu-1"}


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_text("t")
    return path


def completed(environment, token, **settings):
    found = complete_settings(AgentSettings(**settings), environment, token_file=token)
    return found.node, found.kubernetes.enabled


def test_in_a_pod_of_our_daemon_set(token):
    assert completed(IN_POD, token) == ("gpu-1", "on")


def test_settings_win(token):
    assert completed(IN_POD, token, node="n") == ("n", "on")
    off = {"enabled": "off"}
    assert completed(IN_POD, token, kubernetes=off) == ("gpu-1", "off")


def test_nothing_is_looked_for_where_nobody_said_so(token, tmp_path):
    assert completed({}, token) == ("local", "off")
    assert completed(IN_POD, tmp_path / "none") == ("gpu-1", "off")
    kubeconfig = {"KUBECONFIG": "/home/me/.kube/config"}
    assert completed(kubeconfig, tmp_path / "none", node="n") == ("n", "off")


def test_a_kubeconfig_that_was_named(tmp_path):
    named = {"kubeconfig": "/etc/k"}
    assert completed({}, tmp_path / "none", node="n", kubernetes=named) == ("n", "on")


@pytest.mark.parametrize(("text", "read"), [("on", "on"), ("off", "off"), ("auto", "auto")])
def test_yaml_takes_the_words_for_truth_values(tmp_path, text, read):
    config = tmp_path / "agent.yaml"
    config.write_text(f"kubernetes: {{enabled: {text}}}\nworker_status: {{enabled: {text}}}\n")
    found = load_settings(
        AgentSettings, ["--config", str(config)], prog="a", env={}, component="agent"
    )
    assert (found.kubernetes.enabled, found.worker_status.enabled) == (read, read)
