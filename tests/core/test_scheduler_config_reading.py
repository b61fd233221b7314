"""Reading YAML with lines; files that are broken or not what they should be."""

import pytest

from nearkv.scheduler_config.linting import lint
from nearkv.scheduler_config.reading import BrokenYaml, format_path, read_documents

HEAD = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"


def errors(text):
    return [one for one in lint(text).findings if one.severity.value == "error"]


def test_lines_of_keys_and_items():
    (document,) = read_documents("a:\n- b: 1\n-\n  c: {d: 2}\n")
    assert document.value == {"a": [{"b": 1}, {"c": {"d": 2}}]}
    assert document.line(("a", 1, "c", "d")) == 4
    assert document.line(("a", 0, "not there")) == 2
    assert format_path(("a", 1, "c", "d")) == "a[1].c.d"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", 3),
        ("a: 1\n\tb: 2\n", 2),
        ("a: 'x\n", 2),
        ("a: 1\n---\nb: }\n", 3),
        ("a: *nowhere\n", 1),
        ("a: \x01\n", 1),
        ("a: !!python/object:os.system {}\n", 1),
    ],
    ids=["list", "tab", "quote", "second document", "alias", "control character", "tag"],
)
def test_broken_yaml_names_its_line(text, line):
    broken = list(read_documents(text))[-1]
    if isinstance(broken, BrokenYaml):
        assert broken.line == line
        assert broken.problem
    (finding,) = errors(text)[:1]
    assert "refuses to start" in finding.what


def test_aliases_of_aliases_do_not_take_memory():
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (finding,) = errors("\n".join(rows))
    assert "holds too much" in finding.what


def test_nesting_without_end_is_refused():
    (finding,) = errors("[" * 5000)
    assert "nested too deeply" in finding.what or "not YAML" in finding.what


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("", "nothing"),
        ("kind: Deployment\n", "Deployment"),
        ("- a\n", "no kind"),
        ("x\n", "no kind"),
    ],
    ids=["empty", "other kind", "list", "scalar"],
)
def test_a_file_without_a_configuration(text, holds):
    (finding,) = errors(text)
    assert finding.what.endswith(f"it holds {holds}")


def test_only_the_first_document_counts():
    text = f"{HEAD}---\n{HEAD}"
    lines = [one.line for one in lint(text).findings if "first document" in one.what]
    assert lines == [4]


def test_other_documents_before_it_are_passed_over():
    text = f"kind: Namespace\n---\n{HEAD}"
    assert not [one for one in lint(text).findings if "first document" in one.what]


def test_a_configuration_inside_a_config_map_keeps_its_lines():
    text = "kind: ConfigMap\ndata:\n  other: hello\n  config.yaml: |\n" + "".join(
        f"    {line}\n" for line in [*HEAD.splitlines(), "podInitialBackoffSecond: 1"]
    )
    (finding,) = (one for one in errors(text) if "podInitialBackoffSecond" in one.where)
    assert finding.line == 7
    assert finding.fix == "did you mean podInitialBackoffSeconds?"


def test_a_key_that_comes_twice():
    (finding,) = (one for one in errors(HEAD + "parallelism: 4\nparallelism: 5\n") if one.line == 4)
    assert "twice" in finding.what
