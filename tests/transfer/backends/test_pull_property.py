"""Any pull of any blocks between any two layouts is what numpy says it is."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.transfer.backends.kinds import KINDS
from tests.transfer.backends.rig import Rig, layout

IN_THIS_PROCESS = [kind for kind in KINDS if kind.name in ("inproc", "shm", "shm-memmove", "tcp")]
LAYOUT = st.fixed_dictionaries(
    {
        "blocks": st.integers(1, 30),
        "interleaved": st.booleans(),
        "offset": st.integers(0, 100),
        "gap_bytes": st.integers(0, 40),
    }
)
SHARED = st.fixed_dictionaries(
    {"layers": st.integers(1, 4), "block_bytes": st.sampled_from([1, 7, 64, 9000])}
)


@pytest.mark.parametrize("kind", IN_THIS_PROCESS, ids=lambda kind: kind.name)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shared=SHARED, source=LAYOUT, target=LAYOUT, seed=st.integers(0, 1 << 30))
def test_a_pull_is_what_numpy_makes_of_it(kind, shared, source, target, seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(0, min(source["blocks"], target["blocks"]) + 1))
    blocks = random.permutation(source["blocks"])[:count].tolist()
    places = random.permutation(target["blocks"])[:count].tolist()
    rig = Rig(kind, layout(**shared, **source), layout(**shared, **target))
    try:
        report = rig.pull(rig.grant(blocks), places)
        assert (rig.target_bytes == rig.expected(blocks, places)).all()
        assert report.size_bytes == count * shared["layers"] * shared["block_bytes"]
    finally:
        rig.close()
