"""Merge patch (RFC 7386), and server-side apply as far as one level of ownership tells.

Fields are owned leaf by leaf. A list is one leaf, except ``conditions``, whose items are known by
their type, as the schemas of Kubernetes say.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from tests.doubles.api_server.store import ApiProblemError, Json, timestamp

Path = tuple[str, ...]


def merge(target: Any, patch: Any) -> Any:
    """Return ``target`` with ``patch`` merged in; neither is changed."""
    if not isinstance(patch, dict):
        return deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge(result.get(name), value)
    return result


def apply(value: Json, wanted: Json, *, manager: str, force: bool, subresource: str) -> Json:
    """Return ``value`` with the fields of ``wanted`` applied; raises 409 for a conflict.

    Owners are kept in ``metadata.managedFields``, as in Kubernetes.
    """
    result = deepcopy(value)
    owners = _owners(result)
    leaves = dict(_leaves(_ownable(wanted)))
    mine = (manager, subresource)
    rivals = {
        path: owner
        for owner, paths in owners.items()
        if owner != mine
        for path in paths
        if path in leaves and _read(result, path) != leaves[path]
    }
    if rivals and not force:
        raise _conflict(rivals)
    for paths in (paths for owner, paths in owners.items() if owner != mine):
        paths.difference_update(rivals)
    others = {path for owner, paths in owners.items() if owner != mine for path in paths}
    for path in owners.get(mine, set()) - leaves.keys() - others:
        _remove(result, path)
    for path, leaf in leaves.items():
        _write(result, path, leaf)
    owners[mine] = set(leaves)
    _store_owners(result, owners, api_version=str(wanted.get("apiVersion", "v1")))
    return result


def _conflict(rivals: dict[Path, tuple[str, str]]) -> ApiProblemError:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{owner[0]}"',
            "field": "." + ".".join(path),
        }
        for path, owner in sorted(rivals.items())
    ]
    return ApiProblemError(
        409, "Conflict", f"Apply failed with {len(causes)} conflicts", details={"causes": causes}
    )


def _ownable(wanted: Json) -> Json:
    """Leave out what names the object rather than describes it."""
    result = {name: part for name, part in wanted.items() if name not in {"apiVersion", "kind"}}
    unowned = {"name", "namespace", "uid", "resourceVersion", "managedFields"}
    metadata = wanted.get("metadata", {})
    result["metadata"] = {name: part for name, part in metadata.items() if name not in unowned}
    return result


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, (*path, name))
    elif path and path[-1] == "conditions" and isinstance(value, list):
        for item in value:
            yield from _leaves(item, (*path, _key_of(item)))
    else:
        yield path, value


def _key_of(item: Json) -> str:
    return "k:" + json.dumps({"type": item["type"]}, separators=(",", ":"))


def _child(parent: Any, name: str) -> Any:
    if isinstance(parent, list):
        return next((item for item in parent if _key_of(item) == name), None)
    return parent.get(name) if isinstance(parent, dict) else None


def _read(value: Any, path: Path) -> Any:
    for name in path:
        value = _child(value, name)
    return value


def _write(value: Any, path: Path, leaf: Any) -> None:
    for name, following in zip(path, (*path[1:], None), strict=True):
        if following is None:
            value[name] = deepcopy(leaf)
            return
        child = _child(value, name)
        if child is None:
            child = [] if following.startswith("k:") else {}
            if isinstance(value, list):
                child = json.loads(name[2:])
                value.append(child)
            else:
                value[name] = child
        value = child


def _remove(value: Any, path: Path) -> None:
    parent = _read(value, path[:-1])
    if isinstance(parent, dict):
        parent.pop(path[-1], None)
        key = path[-2] if len(path) > 1 else ""
        if key.startswith("k:") and path[-1] == "type":
            # The item's own key went: so does the item.
            items = _read(value, path[:-2])
            items[:] = [item for item in items if item is not parent]


def _owners(value: Json) -> dict[tuple[str, str], set[Path]]:
    entries = value["metadata"].get("managedFields") or []
    return {
        (entry["manager"], entry.get("subresource", "")): set(_paths(entry["fieldsV1"]))
        for entry in entries
        if entry["operation"] == "Apply"
    }


def _paths(fields: Json, path: Path = ()) -> Iterator[Path]:
    if not fields and path:
        yield path
    for name, part in fields.items():
        yield from _paths(part, (*path, name.removeprefix("f:")))


def _store_owners(
    value: Json, owners: dict[tuple[str, str], set[Path]], *, api_version: str
) -> None:
    before = value["metadata"].get("managedFields") or []
    times = {(entry["manager"], entry.get("subresource", "")): entry for entry in before}
    entries = []
    for owner, paths in owners.items():
        fields: Json = {}
        for path in sorted(paths):
            node = fields
            for name in path:
                node = node.setdefault(name if name.startswith("k:") else f"f:{name}", {})
        entry: Json = {
            "manager": owner[0],
            "operation": "Apply",
            "apiVersion": api_version,
            "fieldsType": "FieldsV1",
            "fieldsV1": fields,
        }
        if owner[1]:
            entry["subresource"] = owner[1]
        old = times.get(owner)
        same = old is not None and old["fieldsV1"] == fields
        entry["time"] = old["time"] if same and old is not None else timestamp()
        if paths:
            entries.append(entry)
    value["metadata"]["managedFields"] = entries
