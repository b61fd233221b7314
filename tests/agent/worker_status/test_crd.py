"""The CustomResourceDefinition, as far as it can be checked without an API server."""

import re

import pytest

from nearkv.agent.worker_status.composing import compose
from nearkv.kube.objects import CUSTOM_GROUP, CUSTOM_VERSION, worker_statuses_path
from tests.agent.worker_status.things import crd, node_facts, report, schema_of_status


def version():
    (only,) = crd()["spec"]["versions"]
    return only


def schemas(schema, path="status"):
    """Yield all schemas within one, with their paths."""
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from schemas(part, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from schemas(schema[name], f"{path}[]")


EVERY = [pytest.param(schema, id=path) for path, schema in schemas(schema_of_status())]


def test_names_are_those_that_the_agent_uses():
    spec = crd()["spec"]
    names = spec["names"]
    assert crd()["metadata"]["name"] == f"{names['plural']}.{spec['group']}"
    assert (spec["group"], version()["name"]) == (CUSTOM_GROUP, CUSTOM_VERSION)
    assert worker_statuses_path().endswith(f"/{names['plural']}")
    assert (names["kind"], names["shortNames"], spec["scope"]) == (
        *("WorkerStatus", ["ws"], "Namespaced"),
    )


def test_the_status_is_a_subresource_and_there_is_no_spec():
    assert version()["subresources"] == {"status": {}}
    assert "spec" not in version()["schema"]["openAPIV3Schema"]["properties"]


@pytest.mark.parametrize("schema", EVERY)
def test_the_schema_is_structural_and_bounded(schema):
    assert schema["type"] in ("object", "array", "string", "integer", "number", "boolean")
    assert not {"$ref", "oneOf", "anyOf", "nullable", "default"} & set(schema)
    if schema["type"] == "array":
        assert schema["maxItems"] <= 64
    if schema["type"] == "string" and schema.get("format") != "date-time":
        assert "enum" in schema or schema["maxLength"] <= 256


@pytest.mark.parametrize("column", version()["additionalPrinterColumns"], ids=lambda c: c["name"])
def test_columns_show_fields_that_are_there(column):
    assert column["description"].endswith(".")
    path = column["jsonPath"].removeprefix(".status.")
    if column["jsonPath"] == ".metadata.creationTimestamp":
        return
    fields = schema_of_status()["properties"]
    found = re.fullmatch(r'conditions\[\?\(@\.type=="(\w+)"\)\]\.(\w+)', path)
    if found is None:
        kind = fields[path]
        expected = "date" if kind.get("format") == "date-time" else kind["type"]
        assert column["type"] == expected
    else:
        told = {each["type"] for each in compose(report())["conditions"]}
        assert found[1] in told
        assert found[2] in fields["conditions"]["items"]["properties"]


def test_columns_of_the_plain_view_fit_a_terminal():
    plain = [
        each["name"] for each in version()["additionalPrinterColumns"] if "priority" not in each
    ]
    assert plain == ["Ready", "Reason", "Role", "KV-Used", "Queue", "Node", "Observed", "Age"]


def test_every_field_of_the_schema_is_written_by_something():
    status = compose(
        report(node_facts=node_facts(), prefixes=("a",), prefix_count=1),
    )
    assert set(schema_of_status()["properties"]) - set(status) == {"ranks", "omitted"}
