"""Building the library with gcc, with all of its calls or without some."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_SOURCES = ("nvml.c", "json.c")
_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC")
LIBRARY = "libnvidia-ml.so.1"


def has_compiler() -> bool:
    """Tell whether the library can be built here."""
    return shutil.which("gcc") is not None


def build_library(cache: Path, without: Collection[str] = ()) -> Path:
    """Return the folder of a library that lacks some calls; it is built once in a cache.

    A driver that is too old for a call, or too new, does not export its symbol.
    """
    sources = [_HERE / name for name in _SOURCES]
    digest = hashlib.sha256("\n".join((*_FLAGS, *sorted(without))).encode())
    for path in (*sources, _HERE / "json.h"):
        digest.update(path.read_bytes())
    folder = cache / digest.hexdigest()[:16]
    if (folder / LIBRARY).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"symbols-{os.getpid()}.map"
    hidden = "".join(f" {name};" for name in sorted(without))
    script.write_text(f"{{ global: nvml*; local:{hidden} json_*; }};\n")
    target = folder / f"{LIBRARY}-{os.getpid()}"
    link = (f"-Wl,--version-script={script}", f"-Wl,-soname,{LIBRARY}", "-lpthread")
    subprocess.run(["gcc", *_FLAGS, "-o", target, *sources, *link], check=True)  # noqa: S607 (found on the path)
    target.rename(folder / LIBRARY)  # others may be building it, too
    return folder
