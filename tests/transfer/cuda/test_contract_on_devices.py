"""What every backend promises, kept with both memories on devices; the suite is the same."""

import pytest

from tests.transfer.backends.test_contract import *  # noqa: F403 (the whole suite runs again here)
from tests.transfer.cuda.device_rig import CudaKind, TcpKind


@pytest.fixture(params=[CudaKind, TcpKind], ids=lambda kind: kind.path_name)
def kind(request, machine):
    return request.param(machine)
