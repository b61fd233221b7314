"""``nearkv plan``: questions, answers, refusals."""

import json

import pytest

from nearkv.cli.plan import (
    PlanError,
    PlanQuestion,
    effective_flops_of,
    load_shape,
    parse_link,
    run_plan,
)
from tests.core.test_kv_size import DEEPSEEK, LLAMA_8B


@pytest.fixture
def ask(tmp_path, capsys):
    def ask(config=LLAMA_8B, *, as_json=True, **fields):
        (tmp_path / "config.json").write_text(json.dumps(config))
        question = {"gpu": "h100", "gpus": 1, "links": ["100g-rdma"], "tokens": [4096], **fields}
        run_plan(PlanQuestion(model=tmp_path, **question), as_json=as_json)
        text = capsys.readouterr().out
        return json.loads(text) if as_json else text

    return ask


def test_json_gives_seconds_and_bytes(ask):
    (link,) = ask()["links"]
    (estimate,) = link["estimates"]
    assert estimate["kv_bytes"] == 512 << 20
    assert estimate["pull_seconds"] == pytest.approx(0.045, rel=0.01)
    assert estimate["pays"]


def test_the_table_has_a_row_per_length_and_a_verdict_per_link(ask):
    text = ask(as_json=False, links=["100g-rdma", "0.001"], tokens=[1024, 4096])
    assert "1,024" in text
    assert "4,096" in text
    assert "100g-rdma: a pull pays from" in text
    assert "0.001 GB/s: a pull never pays" in text


def test_more_gpus_recompute_faster(ask):
    one, four = (ask(gpus=n)["links"][0]["estimates"][0]["recompute_seconds"] for n in (1, 4))
    assert four == pytest.approx(one / 4)


def test_a_mixture_of_experts_needs_its_active_parameters(ask):
    with pytest.raises(PlanError, match="--parameters"):
        ask(DEEPSEEK)
    assert ask(DEEPSEEK, parameters_billion=37)["parameters"] == 37_000_000_000


@pytest.mark.parametrize("text", ["{", "[]", "1"], ids=["cut", "list", "number"])
def test_what_is_no_model_configuration_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PlanError, match="--model"):
        load_shape(tmp_path, kv_dtype=None, parameters_billion=None)


@pytest.mark.parametrize("gpu", ["h1000", "-5", "nan", "inf", ""])
def test_an_unknown_gpu_is_refused(gpu):
    with pytest.raises(PlanError, match="--gpu"):
        effective_flops_of(gpu)


@pytest.mark.parametrize(
    ("text", "bandwidth", "setup"),
    [("12.2", 12.2e9, 0.001), ("5@0.5", 5e9, 0.0005), ("TCP-host", 4e9, 0.001)],
)
def test_links_are_parsed(text, bandwidth, setup):
    link = parse_link(text)
    assert (link.bytes_per_second, link.setup_seconds) == (bandwidth, pytest.approx(setup))


@pytest.mark.parametrize("text", ["wifi", "0", "1@x", "-2"])
def test_an_unknown_link_is_refused(text):
    with pytest.raises(PlanError, match="--link"):
        parse_link(text)
