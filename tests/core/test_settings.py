"""Settings: precedence, unknown keys, wrong values, and what is printed."""

from pathlib import Path
from typing import Literal

import pytest
import yaml
from pydantic import Field, SecretStr

from nearkv.errors import SettingsError
from nearkv.settings import (
    Address,
    ComponentSettings,
    SettingsGroup,
    load_settings,
    render_help,
    render_table,
    resolve_settings,
)
from nearkv.settings.layers import MASK


class Limits(SettingsGroup):
    max_body_bytes: int = Field(1000, gt=0, description="Largest request body.")
    idle_seconds: float = Field(30.0, description="Longest pause in a stream.")


class Tls(SettingsGroup):
    certificate: Path = Field(description="PEM file.")


class Engine(SettingsGroup):
    id: str
    url: str = ""
    token: SecretStr | None = None


class DemoSettings(ComponentSettings):
    """A component for these tests."""

    listen: Address = Field(Address("127.0.0.1", 8080), description="Where to listen.")
    name: str = Field("demo", description="A name, a | b.")
    token: SecretStr | None = Field(None, description="Bearer token.")
    policy: Literal["near", "far"] = Field("near", description="Policy.")
    replicas: int | None = Field(None, description="How many.")
    verbose: bool = Field(default=False, description="Say more.")
    limits: Limits = Field(default_factory=Limits)
    tls: Tls | None = Field(None)
    peers: tuple[Address, ...] = Field((), description="Peers.")
    engines: tuple[Engine, ...] = Field((), description="Engines.")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels.")


def resolve(*argv, env=None, file=None):
    return resolve_settings(
        DemoSettings, argv, environment=env or {}, component="demo", config_path=file
    )


def settings_from(*argv, env=None, file=None):
    return resolve(*argv, env=env, file=file).settings


def problems_of(*argv, env=None, file=None):
    with pytest.raises(SettingsError) as caught:
        resolve(*argv, env=env, file=file)
    return caught.value.problems


def load(*argv, env=None):
    return load_settings(DemoSettings, argv, prog="demo", env=env or {}, component="demo")


@pytest.fixture
def write(tmp_path):
    def write_yaml(text):
        path = tmp_path / "demo.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_yaml


FLAG = ("--limits.max-body-bytes", "4")
ENV = {"NEARKV_DEMO_LIMITS__MAX_BODY_BYTES": "3"}
FILE = "limits:\n  max_body_bytes: 2\n"


@pytest.mark.parametrize(
    ("flag", "env", "file", "expected", "source"),
    [
        pytest.param(FLAG, ENV, FILE, 4, "flag", id="flag-over-all"),
        pytest.param((), ENV, FILE, 3, "env", id="env-over-file"),
        pytest.param(FLAG, {}, FILE, 4, "flag", id="flag-over-file"),
        pytest.param(FLAG, ENV, "", 4, "flag", id="flag-over-env"),
        pytest.param((), {}, FILE, 2, "file", id="file-over-default"),
        pytest.param((), {}, "", 1000, None, id="default"),
    ],
)
def test_precedence(write, flag, env, file, expected, source):
    resolved = resolve(*flag, env=env, file=write(file))
    found = resolved.sources.get(("limits", "max_body_bytes"))
    assert resolved.settings.limits.max_body_bytes == expected
    assert (found.value if found else None) == source


def test_each_key_of_a_group_is_merged_on_its_own(write):
    settings = settings_from("--limits.idle-seconds=1.5", env=ENV, file=write("name: x"))
    assert settings.limits == Limits(max_body_bytes=3, idle_seconds=1.5)


def test_an_empty_group_in_the_file_keeps_what_is_set_elsewhere(write):
    settings = settings_from("--tls.certificate", "x.pem", file=write("tls: {}"))
    assert settings.tls == Tls(certificate=Path("x.pem"))


def test_the_environment_can_name_the_file(write):
    assert settings_from(env={"NEARKV_DEMO_CONFIG": write("name: filed")}).name == "filed"


def test_constructing_settings_reads_no_environment(monkeypatch):
    monkeypatch.setenv("NAME", "stray")
    monkeypatch.setenv("NEARKV_DEMO_NAME", "stray")
    assert DemoSettings().name == "demo"


@pytest.mark.parametrize(
    ("argv", "key", "expected"),
    [
        pytest.param(("--verbose",), "verbose", True, id="switch"),
        pytest.param(("--no-verbose",), "verbose", False, id="negated-switch"),
        pytest.param(("--verbose=false",), "verbose", False, id="switch-with-value"),
        pytest.param(("--replicas", "-3"), "replicas", -3, id="negative-number"),
        pytest.param(("--name=--x",), "name", "--x", id="value-with-dashes"),
        pytest.param(
            ("--peers", "a:1", "--peers", "[::1]:2"),
            "peers",
            (Address("a", 1), Address("::1", 2)),
            id="repeated-list",
        ),
        pytest.param(
            ("--engines", '{"id": "a"}', "--engines", '[{"id": "b"}]'),
            "engines",
            (Engine(id="a"), Engine(id="b")),
            id="list-of-objects",
        ),
        pytest.param(("--labels", '{"a": "b"}'), "labels", {"a": "b"}, id="mapping"),
        pytest.param(
            ("--tls.certificate", "x.pem"), "tls", Tls(certificate=Path("x.pem")), id="optional"
        ),
    ],
)
def test_flags(argv, key, expected):
    assert getattr(settings_from(*argv), key) == expected


@pytest.mark.parametrize(
    ("name", "text", "key", "expected"),
    [
        pytest.param("VERBOSE", "true", "verbose", True, id="bool"),
        pytest.param("REPLICAS", "", "replicas", None, id="empty-optional"),
        pytest.param("PEERS", "a:1, b:2", "peers", (Address("a", 1), Address("b", 2)), id="commas"),
        pytest.param("PEERS", '["a:1"]', "peers", (Address("a", 1),), id="json-list"),
        pytest.param("PEERS", "[::1]:1", "peers", (Address("::1", 1),), id="ipv6-is-no-json"),
        pytest.param("PEERS", "", "peers", (), id="empty-list"),
        pytest.param("ENGINES", '[{"id": "a"}]', "engines", (Engine(id="a"),), id="objects"),
    ],
)
def test_environment(name, text, key, expected):
    assert getattr(settings_from(env={f"NEARKV_DEMO_{name}": text}), key) == expected


@pytest.mark.parametrize(
    ("argv", "env", "file", "expected"),
    [
        pytest.param(
            ("--limits.max-body-byte", "1"),
            {},
            "",
            "--limits.max-body-byte: unknown option; did you mean --limits.max-body-bytes?",
            id="flag",
        ),
        pytest.param(
            (),
            {"NEARKV_DEMO_LIMITS__MAX_BODY": "1"},
            "",
            "NEARKV_DEMO_LIMITS__MAX_BODY: unknown variable; "
            "did you mean NEARKV_DEMO_LIMITS__MAX_BODY_BYTES?",
            id="env",
        ),
        pytest.param((), {}, "limits: {max_body: 1}", "limits.max_body: unknown key", id="file"),
        pytest.param(
            (), {}, "engines: [{id: a}, {id: b, urk: c}]", "engines[1].urk: unknown key", id="list"
        ),
        pytest.param(("stray",), {}, "", "stray: unexpected argument", id="positional"),
    ],
)
def test_an_unknown_key_is_named_with_its_path(write, argv, env, file, expected):
    (problem,) = problems_of(*argv, env=env, file=write(file))
    assert problem.startswith(expected)
    assert "did you mean" in problem or argv == ("stray",)


@pytest.mark.parametrize(
    ("argv", "env", "file", "parts"),
    [
        pytest.param(
            ("--limits.max-body-bytes", "many"),
            {},
            "",
            ("limits.max_body_bytes", "got str 'many'", "(from --limits.max-body-bytes)"),
            id="flag",
        ),
        pytest.param((), {"NEARKV_DEMO_LISTEN": "x"}, "", ("NEARKV_DEMO_LISTEN",), id="env"),
        pytest.param((), {}, "name: [1]", ("name", "got list", "demo.yaml"), id="file"),
        pytest.param((), {}, "limits: 3", ("limits: expected a mapping, got int",), id="group"),
        pytest.param((), {}, "- a", ("expected a mapping, got list",), id="document"),
        pytest.param((), {}, "name: a\nname: b", ("'name' is given twice",), id="twice"),
        pytest.param((), {}, "name: [", ("is not valid YAML",), id="syntax"),
        pytest.param((), {}, f"token: '{MASK}'", ("token: holds",), id="mask"),
        pytest.param(("--name",), {}, "", ("--name: needs a value (TEXT)",), id="no-value"),
        pytest.param(("--engines", "{"), {}, "", ("--engines: is not valid JSON",), id="json"),
        pytest.param(("--engines", "3"), {}, "", ("engines[0]: ", "got int"), id="not-an-object"),
        pytest.param((), {}, "engines: [{}]", ("engines[0].id: is required",), id="need"),
        pytest.param((), {}, "tls: {}", ("tls.certificate: is required",), id="empty-group"),
    ],
)
def test_a_wrong_value_is_named_with_path_type_and_source(write, argv, env, file, parts):
    (problem,) = problems_of(*argv, env=env, file=write(file))
    assert all(part in problem for part in parts)


def test_all_problems_are_reported_at_once(write):
    problems = problems_of("--nam", "x", env={"NEARKV_DEMO_REPLICAS": "x"}, file=write("polcy: a"))
    assert [problem.partition(":")[0] for problem in problems] == ["--nam", "polcy", "replicas"]


def test_a_missing_file_is_a_problem(tmp_path):
    (problem,) = problems_of(file=str(tmp_path / "none.yaml"))
    assert "cannot be read: No such file" in problem


def test_a_wrong_secret_is_not_repeated():
    problems = problems_of("--engines", '[{"id": "a", "token": 12345}]', "--limits.idle-seconds=x")
    assert "12345" not in str(problems)


def test_variables_of_a_kubernetes_service_are_passed_over():
    links = {
        "NEARKV_DEMO_SERVICE_HOST": "10.0.0.1",
        "NEARKV_DEMO_SERVICE_PORT_HTTP": "80",
        "NEARKV_DEMO_PORT": "tcp://10.0.0.1:80",
        "NEARKV_DEMO_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert settings_from(env=links) == DemoSettings()
    assert problems_of(env={"NEARKV_DEMO_PORT": "80"})


def test_defaults_of_a_group_belong_into_the_group():
    class Odd(ComponentSettings):
        limits: Limits = Limits(max_body_bytes=5)

    with pytest.raises(TypeError, match="limits: move its defaults into Limits"):
        resolve_settings(Odd, (), environment={}, component="odd")


def test_a_required_setting_says_how_to_set_it():
    class Needy(ComponentSettings):
        node: str

    with pytest.raises(SettingsError, match="node: is required; set --node, NEARKV_NEEDY_NODE or"):
        resolve_settings(Needy, (), environment={}, component="needy")


def test_printed_config_reads_back_as_the_same_settings(write, capsys):
    argv = ["--peers=a:1", "--engines", '[{"id": "a"}]', "--name", "two\nlines # here"]
    with pytest.raises(SystemExit) as stopped:
        load(*argv, "--print-config", env=ENV)
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "max_body_bytes: 3  # env NEARKV_DEMO_LIMITS__MAX_BODY_BYTES" in printed
    assert settings_from(file=write(printed)) == settings_from(*argv, env=ENV)


def test_printed_config_masks_secrets_and_names_sources(write, capsys):
    path = write("engines: [{id: a, token: deep}]\nverbose: true\n")
    with pytest.raises(SystemExit):
        load("--config", path, "--token", "flat", "--print-config")
    printed = capsys.readouterr().out
    assert "flat" not in printed
    assert "deep" not in printed
    assert f"token: '{MASK}'  # flag --token" in printed
    assert "verbose: true  # file" in printed
    assert "tls: null  # default" in printed
    assert yaml.safe_load(printed)["engines"][0]["token"] == MASK


def test_wrong_settings_end_the_program_with_status_two(capsys):
    with pytest.raises(SystemExit) as stopped:
        load("--nam=x", "--policy=middle")
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("demo: the configuration is wrong:\n  --nam: unknown")
    assert "policy: " in captured.err


@pytest.mark.parametrize("argv", [("--help",), ("-h",), ("--version",)])
def test_help_and_version_end_the_program_well(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        load(*argv, "--policy=wrong")
    assert stopped.value.code == 0
    assert "demo" in capsys.readouterr().out


def test_help_lists_every_option_with_default_unit_and_variable():
    text = " ".join(render_help(DemoSettings, prog="demo", component="demo").split())
    assert "A component for these tests." in text
    assert (
        "--limits.max-body-bytes INT Largest request body. [default: 1000 bytes] "
        "[env: NEARKV_DEMO_LIMITS__MAX_BODY_BYTES]" in text
    )
    assert "--policy near|far Policy. [default: near]" in text
    assert "--verbose / --no-verbose Say more. [default: false]" in text
    assert "Keys of each, with defaults: id [required], url" in text
    assert "--peers HOST:PORT... Peers. [default: empty]" in text


def test_the_documentation_table_has_a_row_for_each_setting():
    rows = render_table(DemoSettings, "demo").splitlines()
    assert len(rows) == 2 + 12 + 3
    assert "| `engines[].id` | TEXT | required |  |  |" in rows
    assert (
        "| `limits.idle_seconds` | NUMBER | 30.0 seconds | `NEARKV_DEMO_LIMITS__IDLE_SECONDS` "
        "| Longest pause in a stream. |" in rows
    )
    assert any("A name, a \\| b." in row for row in rows)
