"""Reading YAML with the lines of its keys, several documents, and what is wrong with it (pure)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]

_LARGEST_NODES = 100_000
"""Aliases can make a small file a huge document."""


@dataclass(slots=True)
class Document:
    """A document: its value, the line of each key and item, keys that come twice."""

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    repeated: list[Path] = field(default_factory=list)

    def line(self, path: Path) -> int:
        """Return the line of a path, or of the nearest thing around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)


@dataclass(frozen=True, slots=True)
class BrokenYaml:
    """Why reading stopped, and at which line."""

    line: int
    problem: str


def read_documents(text: str, first_line: int = 1) -> Iterator[Document | BrokenYaml]:
    """Yield the documents of a file; a broken one ends it. ``first_line`` is that of ``text``."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:
        # A character that YAML does not know; found before anything is read.
        yield BrokenYaml(first_line, _problem(error))
        return
    try:
        while loader.check_node():
            reader = _Reader(loader, first_line)
            document = Document()
            document.value = reader.read(loader.get_node(), (), document)
            yield document
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        yield BrokenYaml(first_line + mark.line if mark else first_line, _problem(error))
    except RecursionError:
        yield BrokenYaml(first_line, "it is nested too deeply")
    finally:
        loader.dispose()


def format_path(path: Path) -> str:
    """Return a path as people write it: ``extenders[0].weight``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def mapping_of(value: object) -> Mapping[str, Any]:
    """Return a mapping, or an empty one for anything else; what is wrong is said elsewhere."""
    return value if isinstance(value, Mapping) else {}


def list_of(value: object) -> list[Any]:
    """Return a list, or an empty one for anything else."""
    return value if isinstance(value, list) else []


class _Reader:
    """Turns nodes into values and remembers where they were."""

    def __init__(self, loader: yaml.SafeLoader, first_line: int) -> None:
        self._loader = loader
        self._first_line = first_line
        self._seen = 0

    def read(self, node: yaml.Node | None, path: Path, document: Document) -> object:
        if node is None:
            return None
        self._seen += 1
        if self._seen > _LARGEST_NODES:
            raise ValueError("it holds too much, perhaps by aliases of aliases")
        document.lines.setdefault(path, self._first_line + node.start_mark.line)
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, path, document)
        if isinstance(node, yaml.SequenceNode):
            return [
                self.read(item, (*path, index), document) for index, item in enumerate(node.value)
            ]
        value: object = self._loader.construct_object(node)
        return value

    def _read_mapping(
        self, node: yaml.MappingNode, path: Path, document: Document
    ) -> dict[str, object]:
        self._loader.flatten_mapping(node)
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            place = (*path, key)
            if key in values:
                document.repeated.append(place)
            document.lines[place] = self._first_line + key_node.start_mark.line
            values[key] = self.read(value_node, place, document)
        return values


def _problem(error: Exception) -> str:
    parts = [getattr(error, name, None) for name in ("context", "problem")]
    said = ", ".join(part for part in parts if part)
    return said or str(error).splitlines()[0]
