"""The connector's settings."""

import pytest

from nearkv.transfer.connector.settings import DEFAULT_SOCKET, read_settings


def test_the_configuration_wins_over_the_environment():
    environment = {"NEARKV_ENGINE": "from-env", "NEARKV_AGENT_SOCKET": "/env.sock"}
    settings = read_settings({"engine": "e1", "socket": "/x.sock"}, environment)
    assert (settings.engine, str(settings.socket_path)) == ("e1", "/x.sock")
    settings = read_settings({}, environment)
    assert (settings.engine, settings.socket) == ("from-env", "/env.sock")


def test_without_any_there_are_defaults():
    settings = read_settings({}, {})
    assert settings.engine
    assert settings.socket == DEFAULT_SOCKET


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"sokcet": "/x"}, "sokcet"),
        ({"lease_seconds": "long"}, "lease_seconds"),
        ({"lease_seconds": 0}, "lease_seconds"),
        ({"lookup_seconds": -1}, "lookup_seconds"),
        ({"lease_slots": 0}, "lease_slots"),
    ],
)
def test_what_cannot_work_names_the_field(extra, named):
    with pytest.raises(ValueError, match=named):
        read_settings(extra, {})
