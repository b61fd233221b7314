import pytest

from nearkv.demo.errors import SetUpError
from nearkv.demo.locking import exclusive


def test_second_holder_gives_up_at_the_deadline(tmp_path):
    path = tmp_path / "engine-environment.lock"
    lines = []
    with (
        exclusive(path, deadline_seconds=1),
        pytest.raises(SetUpError, match="another process has held"),
        exclusive(path, deadline_seconds=0.1, progress=lines.append),
    ):
        pass
    assert lines == ["engine-environment: another process is at it, waiting 0 s"]


def test_lock_is_free_after_the_block(tmp_path):
    path = tmp_path / "lock"
    for _ in range(2):
        with exclusive(path, deadline_seconds=0):
            pass
