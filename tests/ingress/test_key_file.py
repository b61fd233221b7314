"""Following the file of tenants: a new one counts once it is whole."""

import asyncio
from collections import Counter

import pytest

from nearkv.ingress.errors import KeyRefusedError
from nearkv.ingress.key_file import KeyFile
from nearkv.ingress.tenants import Tenants
from tests.integration.stack import eventually

BEFORE = "tenants:\n- name: a\n  keys:\n  - sk-before\n"
AFTER = "tenants:\n- name: a\n  keys:\n  - sk-after\n- name: b\n  keys:\n  - sk-b\n"


class Reading(KeyFile):
    """A key file that is told what each look at it finds; the last one stays."""

    def __init__(self, path, looks):
        path.write_text(BEFORE)
        self.outcomes = Counter()
        super().__init__(
            path, Tenants(lambda: 0.0), seconds=0.001, count=lambda o: self.outcomes.update([o])
        )
        self.load()
        self.looks = list(looks)

    def _read(self):
        if len(getattr(self, "looks", ())) > 0:
            self._path.write_text(self.looks.pop(0))
        return super()._read()

    def knows(self, key):
        try:
            self.tenants.admit(key)
        except KeyRefusedError:
            return False
        return True


@pytest.fixture
async def follow():
    tasks = []

    def begin(file):
        tasks.append(asyncio.create_task(file.follow()))

    yield begin
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_beginning_of_a_file_is_no_file(tmp_path, follow):
    growing = [AFTER[:length] for length in range(len(BEFORE) - 4, len(AFTER))]
    file = Reading(tmp_path / "tenants.yaml", [*growing, AFTER])
    follow(file)
    await eventually(lambda: file.knows("sk-b"), what="the whole file is loaded")
    assert file.outcomes == {"loaded": 2}
    assert file.knows("sk-after")


async def test_a_file_that_cannot_be_used_leaves_the_tenants_as_they_are(tmp_path, follow):
    file = Reading(tmp_path / "tenants.yaml", ["tenants: 1"] * 4)
    follow(file)
    # An alert looks at how the count grows: it must not end before the trouble does.
    await eventually(lambda: file.outcomes["failed"] > 2, what="it is counted again and again")
    assert not file.looks
    assert file.knows("sk-before")
    file._path.write_text(AFTER)
    await eventually(lambda: file.knows("sk-b"), what="the next one is loaded")
    assert file.outcomes["loaded"] == 2


async def test_a_file_that_is_as_before_again_is_no_news(tmp_path, follow):
    file = Reading(tmp_path / "tenants.yaml", [AFTER, BEFORE, AFTER, BEFORE, BEFORE])
    follow(file)
    await eventually(lambda: not file.looks, what="all was seen")
    assert file.outcomes == {"loaded": 1}
    assert file.knows("sk-before")
