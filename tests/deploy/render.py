"""Write all that is made from the chart: its schema, the golden rendering, kustomize.

``python -m tests.deploy.render``; the tests compare what is there with what would be written.
"""

from pathlib import Path

from tests.deploy.chart import DEPLOY, profile, render
from tests.deploy.kustomize import kustomize_files
from tests.deploy.schema import write_schema

GOLDEN = DEPLOY / "golden" / "default.yaml"
_HEAD = (
    "# What `helm install nearkv deploy/helm/nearkv` makes with nothing but image.registry set.\n"
    "# Written by `make render`; tests/deploy compares.\n"
)


def golden_text() -> str:
    """Return the chart as rendered with its defaults, for people to read."""
    return _HEAD + render(profile("default")).as_text()


def write(path: Path, text: str) -> None:
    """Write a file where it would change."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def main() -> None:
    """Write everything; files that are made no more are removed."""
    write_schema()
    write(GOLDEN, golden_text())
    files = kustomize_files()
    for path in (DEPLOY / "kustomize").rglob("*.yaml"):
        if path not in files:
            path.unlink()
    for path, text in files.items():
        write(path, text)


if __name__ == "__main__":
    main()
