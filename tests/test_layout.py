"""The layout: component folders linked under ``src/nearkv``, and imports that stay cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
COMPONENTS = ("agent", "extender", "ingress", "transfer")
HEAVY = ("vllm", "torch", "pynvml", "transformers", "ucxx", "nixl", "grpc", "kubernetes")
"""Imported lazily, in one adapter each: never by merely importing a module."""

IN_THE_ENGINES_ENVIRONMENT = {
    "nearkv.demo.small_model",
    "nearkv.demo.tiny_model",
    "nearkv.transfer.vllm_connector",
}
"""What runs where vLLM is installed; nothing here imports it."""

FOLDERS = (SRC / "nearkv", *(SRC / "nearkv" / name for name in COMPONENTS))
SOURCES = sorted({path for folder in FOLDERS for path in folder.rglob("*.py")})


def module_of(path):
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sorted({module_of(path) for path in SOURCES} - IN_THE_ENGINES_ENVIRONMENT)


def run_python(code, *arguments, cwd, seconds=50):
    """Run code in a fresh interpreter that knows nothing but ``src``."""
    prelude = f"import sys; sys.path.insert(0, {str(SRC)!r})\n"
    command = [sys.executable, "-W", "error", "-P", "-c", prelude + code, *arguments]
    done = subprocess.run(  # noqa: PLW1510 (the return code is asserted by callers)
        command, cwd=cwd, capture_output=True, text=True, timeout=seconds
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", COMPONENTS)
def test_components_are_relative_links_within_the_checkout(name):
    link = SRC / "nearkv" / name
    assert link.is_symlink()
    assert link.readlink() == Path("../..") / name
    assert link.resolve() == (ROOT / name).resolve()
    assert (link / "__init__.py").is_file()


def test_nothing_else_under_src_is_a_link():
    links = {path.name for path in SRC.rglob("*") if path.is_symlink()}
    assert links == set(COMPONENTS)
    assert [path.name for path in SRC.iterdir() if (path / "__init__.py").exists()] == ["nearkv"]


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_imports_are_absolute_and_below_nearkv(path):
    imported = list(imports_of(path))
    assert [name for name in imported if name.startswith(".")] == []
    assert [name for name in imported if name.split(".")[0] in (*COMPONENTS, "src", "tests")] == []


@pytest.mark.parametrize("name", COMPONENTS)
def test_components_have_no_name_of_their_own(name, tmp_path):
    returncode, output = run_python(f"import {name}", cwd=tmp_path)
    assert returncode != 0
    assert "ModuleNotFoundError" in output


# Each module is imported in a process of its own, so that no module works only because
# another one was imported first. The libraries are loaded once and inherited by the forks.
IMPORT_EACH = """
import os, traceback
import aiohttp.web, jinja2, msgspec, numpy, prometheus_client, pydantic_settings, rich, structlog
import tokenizers, typer, uvloop, xxhash, yaml, zmq.asyncio
before = set(sys.modules)
heavy, modules = sys.argv[1].split(","), sys.argv[2:]
running, failed = {}, []
while modules or running:
    if not modules or len(running) >= (os.cpu_count() or 1):
        child, status = os.wait()
        module = running.pop(child)
        failed += [module] if status else []
        continue
    module = modules.pop()
    child = os.fork()
    running[child] = module
    if child == 0:
        wrong = ""
        try:
            __import__(module)
            unwanted = sorted((set(sys.modules) - before).intersection(heavy))
            wrong = f"imports {unwanted}" if unwanted else ""
        except BaseException:
            wrong = traceback.format_exc()
        if wrong:
            print(f"{module}: {wrong}", flush=True)
        os._exit(bool(wrong))
sys.exit(f"failed: {failed}" if failed else 0)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_module_can_be_imported_first_and_imports_nothing_heavy(tmp_path):
    assert len(MODULES) > 40
    returncode, output = run_python(
        IMPORT_EACH, ",".join(HEAVY), *MODULES, cwd=tmp_path, seconds=280
    )
    assert returncode == 0, output


@pytest.mark.parametrize("module", ["nearkv.extender", "nearkv.transfer", "nearkv.agent"])
def test_a_component_can_be_imported_for_next_to_nothing(module, tmp_path):
    code = f"import {module}; sys.exit(str([m for m in sys.modules if m.startswith('aio')]))"
    _, output = run_python(code, cwd=tmp_path)
    assert output.strip() == "[]"


@pytest.mark.skipif("nearkv.cli.__main__" not in MODULES, reason="the command line is not there")
def test_the_command_line_starts_without_pydantic(tmp_path):
    code = (
        "import nearkv.cli.__main__\n"
        "sys.exit(str(sorted({'pydantic', 'aiohttp', 'zmq', 'tokenizers'} & set(sys.modules))))"
    )
    _, output = run_python(code, cwd=tmp_path)
    assert output.strip() == "[]"
