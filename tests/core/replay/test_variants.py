"""Policies, settings files and sweeps of settings become variants."""

import pytest

from nearkv.replay.errors import ReplayError
from nearkv.replay.variants import list_variants


def test_values_multiply_and_name_the_variant():
    variants = list_variants(["cost"], ["cost.crowding_weight=0,1", "cost.floor-share=0,0.1"])
    assert [v.label for v in variants] == [
        "cost crowding_weight=0 floor-share=0",
        "cost crowding_weight=0 floor-share=0.1",
        "cost crowding_weight=1 floor-share=0",
        "cost crowding_weight=1 floor-share=0.1",
    ]
    assert variants[3].settings.cost.crowding_weight == 1.0
    assert variants[3].settings.cost.floor_share == 0.1


def test_settings_do_not_multiply_others_policies():
    variants = list_variants(["random", "cost"], ["cost.crowding_weight=0,1"])
    assert [v.policy for v in variants] == ["random", "cost", "cost"]


def test_the_ingress_s_own_file_is_taken_and_the_policy_is_the_options(tmp_path):
    file = tmp_path / "ingress.yaml"
    file.write_text("policy: round-robin\ncost: {crowding_weight: 5}\n")
    (variant,) = list_variants(["cost"], [], config=str(file))
    assert variant.settings.policy.value == "cost"
    assert variant.settings.cost.crowding_weight == 5.0


@pytest.mark.parametrize(
    ("policies", "sets", "said"),
    [
        (["what"], [], "--policy: 'what' is none of"),
        ([], [], "--policy: name at least one"),
        (["cost"], ["cost.crowding_weight"], "--set: expected key=value"),
        (["cost"], ["cost.no_such=1"], "unknown option"),
        (["cost"], ["cost.crowding_weight=much"], "--cost.crowding-weight"),
        (["cost"], ["cost.floor_ms=" + ",".join(map(str, range(300)))], "200 at most"),
    ],
)
def test_mistakes_are_named(policies, sets, said):
    with pytest.raises(ReplayError, match=said):
        list_variants(policies, sets)
