"""``values.schema.json``: made of the default values, rules for some paths, and the settings.

So a value that is not in ``values.yaml`` is refused, and so is a setting that its component does
not have. Secrets are refused among the settings: they would stand in a ConfigMap.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from nearkv.agent.settings import AgentSettings
from nearkv.extender.settings import ExtenderSettings
from nearkv.ingress.settings import IngressSettings
from nearkv.settings import ServiceSettings
from tests.deploy.chart import CHART, Json

RULES = CHART.parent / "schema-rules.yaml"
SCHEMA = CHART / "values.schema.json"
_COMPONENTS: dict[str, type[ServiceSettings]] = {
    "agent": AgentSettings,
    "extender": ExtenderSettings,
    "ingress": IngressSettings,
}


def schema_text() -> str:
    """Return the whole file."""
    return json.dumps(build_schema(), indent=1, sort_keys=True) + "\n"


def build_schema() -> Json:
    """Return the schema of the values."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    unused = set(rules)
    root = _schema_of(values, "", rules, unused)
    if unused:
        raise LookupError(f"{RULES.name} has rules for what is no value: {sorted(unused)}")
    # Charts that have this one as a part pass it on.
    root["properties"]["global"] = {"type": "object"}
    root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    root["$defs"] = {}
    for component, settings in _COMPONENTS.items():
        for name, part in _settings_parts(component, settings):
            root["$defs"][name] = part
        root["properties"][component]["properties"]["config"] = {"$ref": f"#/$defs/{component}"}
    return root


def _schema_of(value: object, path: str, rules: Json, unused: set[str]) -> Json:
    if path in rules:
        unused.discard(path)
        rule: Json = rules[path]
        if "merge" not in rule:
            return rule
        merged: Json = _plain(value, path, rules, unused) | rule["merge"]
        return merged
    # A rule for a name holds wherever the name is.
    name = f"*.{path.rpartition('.')[2]}"
    if name in rules:
        unused.discard(name)
        named: Json = rules[name]
        return named
    return _plain(value, path, rules, unused)


def _plain(value: object, path: str, rules: Json, unused: set[str]) -> Json:
    match value:
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer"}
        case str():
            return {"type": "string"}
        case dict():
            parts = {
                key: _schema_of(each, f"{path}.{key}".lstrip("."), rules, unused)
                for key, each in value.items()
            }
            return {"type": "object", "properties": parts, "additionalProperties": False}
        case _:
            raise TypeError(f"{path}: {RULES.name} has to say what {value!r} is")


def _settings_parts(component: str, settings: type[ServiceSettings]) -> Iterator[tuple[str, Json]]:
    """Yield the parts of a component's schema, named after it."""
    schema = settings.model_json_schema()
    parts = {f"{component}{name}": part for name, part in schema.pop("$defs", {}).items()}
    yield component, _adapt(schema, component)
    for name, part in parts.items():
        yield name, _adapt(part, component)


def _adapt(node: Any, component: str) -> Any:
    """Point references at their new names, leave secrets and titles out."""
    if isinstance(node, list):
        return [_adapt(each, component) for each in node]
    if not isinstance(node, dict):
        return node
    made = {}
    for key, value in node.items():
        if key == "$ref":
            made[key] = value.replace("#/$defs/", f"#/$defs/{component}")
        elif key == "properties":
            kept = {name: each for name, each in value.items() if not _is_secret(each)}
            made[key] = {name: _adapt(each, component) for name, each in kept.items()}
        elif key == "required":
            secret = {name for name, each in node["properties"].items() if _is_secret(each)}
            made[key] = [name for name in value if name not in secret]
        elif key not in {"title", "default"}:
            made[key] = _adapt(value, component)
    return made


def _is_secret(schema: Json) -> bool:
    return any(each.get("format") == "password" for each in (schema, *schema.get("anyOf", ())))


def write_schema(path: Path = SCHEMA) -> None:
    """Write the file."""
    path.write_text(schema_text(), encoding="utf-8")
