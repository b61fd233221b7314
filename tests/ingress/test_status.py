"""What the status says of pairs."""

import pytest

from nearkv.ingress.fleet import EngineView
from nearkv.ingress.status import count_pairs
from nearkv.state.model import EngineInfo, TransferInfo


def mover(role, compat="c"):
    transfer = TransferInfo(mode="agent", compat=compat)
    info = EngineInfo(id="e", incarnation="i", url="", role=role, transfer=transfer)
    return EngineView(info, agent="")


@pytest.mark.parametrize(
    ("roles", "pairs"),
    [
        pytest.param([], 0, id="nobody"),
        pytest.param(["both"], 0, id="not with itself"),
        pytest.param(["both", "both"], 2, id="each way"),
        pytest.param(["prefill", "prefill", "decode"], 2, id="by role"),
        pytest.param(["prefill", "decode", "both"], 3, id="mixed"),
        pytest.param(["prefill", "prefill"], 0, id="nobody decodes"),
    ],
)
def test_pairs_are_counted_by_role(roles, pairs):
    assert count_pairs([mover(role) for role in roles]) == pairs


def test_pairs_are_counted_by_compat():
    assert count_pairs([mover("prefill"), mover("decode", "other"), mover("both", "other")]) == 1
