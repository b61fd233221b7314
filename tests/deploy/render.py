"""Write all that is made from the chart: its schema, the golden rendering, kustomize.

``python -m tests.deploy.render``; the tests compare what is there with what would be written.
"""

from pathlib import Path

from tests.deploy.chart import DEPLOY, profile, render
from tests.deploy.kustomize import kustomize_files
from tests.deploy.schema import write_schema

_MADE = "# Written by `make render`; tests/deploy compares.\n"
GOLDEN = {
    "default": "# What the chart makes with nothing but image.registry set.\n",
    "tls": "# What it makes with tls.enabled, ServiceMonitors and a file of decisions:\n"
    "# ci/tls-values.yaml.\n",
}
"""The profiles that are kept as rendered, by what they begin with."""


def golden_path(name: str) -> Path:
    """Return where a profile's rendering is kept."""
    return DEPLOY / "golden" / f"{name}.yaml"


def golden_text(name: str) -> str:
    """Return a profile as rendered, for people to read."""
    return GOLDEN[name] + _MADE + render(profile(name)).as_text()


def write(path: Path, text: str) -> None:
    """Write a file where it would change."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def main() -> None:
    """Write everything; files that are made no more are removed."""
    write_schema()
    for name in GOLDEN:
        write(golden_path(name), golden_text(name))
    files = kustomize_files()
    for path in (DEPLOY / "kustomize").rglob("*.yaml"):
        if path not in files:
            path.unlink()
    for path, text in files.items():
        write(path, text)


if __name__ == "__main__":
    main()
