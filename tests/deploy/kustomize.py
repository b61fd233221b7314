"""The kustomize base and overlays, made from the chart.

The base is the profile ``base``, a file for each component; an overlay is the difference between
its profile and the base, as JSON patches that people can read, so that both ways of installing
give the same objects.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from tests.deploy.chart import DEPLOY, Json, profile, render

KUSTOMIZE = DEPLOY / "kustomize"
BASE_PROFILE = "base"
OVERLAYS = ("kind", "large", "minimal", "rdma")
_HEAD = "# Made from the chart by `make render`; change the chart.\n"
Key = tuple[str, str, str, str]


def objects_of(name: str) -> dict[Key, Json]:
    """Return a profile's objects, without the pods of ``helm test``."""
    values = profile(name) | {"tests": {"enabled": False}}
    return {key_of(each): each for each in render(values).objects}


def key_of(value: Json) -> Key:
    """Return what names an object."""
    metadata = value["metadata"]
    return value["apiVersion"], value["kind"], metadata.get("namespace", ""), metadata["name"]


def kustomize_files() -> dict[Path, str]:
    """Return all files by path."""
    base = objects_of(BASE_PROFILE)
    files = dict(_base_files(base))
    for name in OVERLAYS:
        files |= _overlay_files(name, base, objects_of(name))
    return files


def _base_files(base: Mapping[Key, Json]) -> Iterator[tuple[Path, str]]:
    by_file: dict[str, list[Json]] = {}
    for each in base.values():
        component = each["metadata"]["labels"]["app.kubernetes.io/component"]
        by_file.setdefault(f"{component}.yaml", []).append(each)
    folder = KUSTOMIZE / "base"
    head = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": sorted(by_file),
    }
    yield folder / "kustomization.yaml", _HEAD + dump(head)
    for name, objects in by_file.items():
        yield folder / name, _HEAD + "---\n".join(dump(each) for each in objects)


def _overlay_files(
    name: str, base: Mapping[Key, Json], wanted: Mapping[Key, Json]
) -> dict[Path, str]:
    folder = KUSTOMIZE / "overlays" / name
    head: Json = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../../base"],
        "patches": [],
    }
    added = [each for key, each in wanted.items() if key not in base]
    for key, each in base.items():
        if key not in wanted:
            gone = {"apiVersion": each["apiVersion"], "kind": each["kind"], "$patch": "delete"}
            gone["metadata"] = {
                part: each["metadata"][part]
                for part in ("name", "namespace")
                if part in each["metadata"]
            }
            head["patches"].append({"patch": dump(gone)})
            continue
        changes = list(_changes(each, wanted[key], ""))
        if changes:
            head["patches"].append({"target": _target(key), "patch": dump(changes)})
    files = {}
    if added:
        head["resources"].append("added.yaml")
        files[folder / "added.yaml"] = _HEAD + "---\n".join(dump(each) for each in added)
    files[folder / "kustomization.yaml"] = _HEAD + dump(head)
    return files


def _target(key: Key) -> Json:
    version, kind, namespace, name = key
    group, _, version = version.rpartition("/")
    target = {
        "group": group,
        "version": version,
        "kind": kind,
        "namespace": namespace,
        "name": name,
    }
    return {part: value for part, value in target.items() if value}


def _changes(before: object, after: object, path: str) -> Iterator[Json]:
    """Yield the JSON patch from one value to another; lists are replaced whole."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() - after.keys()):
            yield {"op": "remove", "path": f"{path}/{_escape(name)}"}
        for name, value in after.items():
            inner = f"{path}/{_escape(name)}"
            if name not in before:
                yield {"op": "add", "value": value, "path": inner}
            else:
                yield from _changes(before[name], value, inner)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _changes(old, new, f"{path}/{index}")
    elif before != after:
        # The path last: kustomize cuts off the newline that ends a patch, and a text with it.
        yield {"op": "replace", "value": after, "path": path}


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and lists indented as people write them."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: FBT001, FBT002 (PyYAML's)
        del indentless
        super().increase_indent(flow, False)  # noqa: FBT003 (PyYAML's)

    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def dump(value: object) -> str:
    """Return YAML."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
