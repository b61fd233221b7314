"""Images by buildah, without a registry: on a Debian base that debootstrap makes.

The base stands in for ``python:3.12-slim`` and, with a virtual environment, for vLLM's image. As
in the slim image there are Python's headers and no compiler.
"""

import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.chart import DEPLOY, ROOT

WANTED = "NEARKV_TEST_IMAGES"
"""Set where the images are to be built: it takes root, the network and some minutes."""
PROGRAMS = ("buildah", "debootstrap", "unshare", "chroot", "setpriv")
FOLDER = ROOT / "build" / "images"
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,python3-pip,libpython3-dev,python-is-python3,ca-certificates"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
"""Of this host, for pip: registries may be reached through a proxy that has its own."""
_BASE_IMAGE = "localhost/python-base"
_VLLM_IMAGE = "localhost/vllm-base"
_DEADLINE_SECONDS = 900.0


def why_not() -> str:
    """Return why images cannot be built here, empty where they can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if os.geteuid() != 0:
        return "it takes root"
    if missing:
        return f"{', '.join(missing)} cannot be found (Debian: apt-get install buildah debootstrap)"
    return ""


@dataclass(frozen=True, slots=True)
class Image:
    """An image that was built, and its configuration."""

    name: str
    config: dict


class Builder:
    """Builds the Dockerfiles; what it makes lies below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _buildah(self, *arguments: str) -> str:
        store = ("--root", str(self._folder / "store"), "--runroot", str(self._folder / "run"))
        return _run("buildah", *store, *arguments)

    def make_bases(self) -> None:
        """Make the images that stand in for those of registries; Debian's files are kept."""
        base = self._folder / "base"
        if not (base / "usr" / "bin" / "python").exists():
            shutil.rmtree(base, ignore_errors=True)
            _run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(base))
        container = self._buildah("from", "scratch")
        self._buildah("add", "-q", container, str(base), "/")
        self._buildah("commit", "-q", "--rm", container, _BASE_IMAGE)
        container = self._buildah("from", "--pull-never", _BASE_IMAGE)
        self._buildah("run", container, "--", "python", "-m", "venv", "/opt/venv")
        self._buildah("config", "--env", "PATH=/opt/venv/bin:/usr/bin:/bin", container)
        self._buildah("commit", "-q", "--rm", container, _VLLM_IMAGE)

    def build(self, name: str) -> Image:
        """Build a Dockerfile of deploy/images."""
        file = DEPLOY / "images" / f"{name}.Dockerfile"
        pip = self._folder / "pip.conf"
        pip.write_text(f"[global]\ncert = {CERTIFICATES}\n")
        self._buildah(
            *("bud", "-q", "--layers=false", "--pull-never"),
            *("--build-arg", f"PYTHON_IMAGE={_BASE_IMAGE}"),
            *("--build-arg", f"VLLM_IMAGE={_VLLM_IMAGE}"),
            *("--volume", f"{pip}:/etc/pip.conf:ro"),
            *("--volume", f"{CERTIFICATES.parent}:{CERTIFICATES.parent}:ro"),
            *("--ignorefile", f"{file}.dockerignore", "--file", str(file)),
            *("--tag", f"localhost/{name}", str(ROOT)),
        )
        found = json.loads(self._buildah("inspect", "--type", "image", f"localhost/{name}"))
        return Image(name, found["OCIv1"]["config"])

    @contextmanager
    def unpacked(self, image: Image):
        """Have an image's files in a folder for the length of a block."""
        container = self._buildah("from", "--pull-never", f"localhost/{image.name}")
        try:
            yield Path(self._buildah("mount", container))
        finally:
            self._buildah("umount", container)
            self._buildah("rm", container)


def _run(*command: str) -> str:
    # Layers are plain folders, and steps share this host's network: no daemon, no cgroups.
    environment = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout.strip()
