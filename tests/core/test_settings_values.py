"""What several components' settings share: URLs, secrets, unique ids, ages."""

import pytest
from pydantic import SecretStr, ValidationError

from nearkv.agent.settings import AgentSettings
from nearkv.errors import SettingsError
from nearkv.ingress.settings import IngressSettings
from nearkv.settings import resolve_settings, secret_bytes

ENGINES = [{"id": name, "url": "http://e:1"} for name in ("a", "b", "a", "c", "c")]


@pytest.mark.parametrize(
    ("given", "kept"),
    [("http://a:1", "http://a:1"), ("http://a:1/", "http://a:1"), ("https://a/x/", "https://a/x")],
)
def test_urls_are_kept_without_a_slash_at_their_end(given, kept):
    assert IngressSettings(agents=[given]).agents == (kept,)


@pytest.mark.parametrize("wrong", ["a:1", "127.0.0.1:9470", "ftp://a:1", "http://", "http://a:b"])
def test_what_is_no_http_url_is_refused(wrong):
    with pytest.raises(ValidationError, match="agents"):
        IngressSettings(agents=[wrong])


@pytest.mark.parametrize("name", ["agent_token", "admin_token", "engine_api_key", "cluster_secret"])
def test_an_empty_secret_is_refused(name):
    with pytest.raises(ValidationError, match=r"is empty; leave it out"):
        IngressSettings(**{name: ""})


def test_a_cluster_secret_is_measured_in_bytes():
    assert secret_bytes(AgentSettings(cluster_secret="x" * 64).cluster_secret) == b"x" * 64
    with pytest.raises(ValidationError, match="has 66 bytes, the limit is 64"):
        AgentSettings(cluster_secret="ü" * 33)


def test_no_secret_is_no_bytes():
    assert secret_bytes(None) == b""
    assert secret_bytes(SecretStr("ü")) == b"\xc3\xbc"


@pytest.mark.parametrize("settings_class", [AgentSettings, IngressSettings])
def test_ids_must_be_unique_and_the_repeated_are_named(settings_class, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(f"engines: {ENGINES}", encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        resolve_settings(settings_class, [], environment={}, component="x", config_path=str(path))
    assert caught.value.problems == (f"engines: ids must be unique, repeated: a, c (from {path})",)


@pytest.mark.parametrize("settings_class", [AgentSettings, IngressSettings])
def test_what_is_fresh_is_not_older_than_what_is_aged(settings_class):
    with pytest.raises(ValidationError, match=r"must not be below fresh_seconds \(40\)"):
        settings_class(freshness={"fresh_seconds": 40})
    limits = settings_class(freshness={"fresh_seconds": 40, "aged_seconds": 40}).freshness.limits
    assert (limits.fresh_seconds, limits.aged_seconds) == (40, 40)
