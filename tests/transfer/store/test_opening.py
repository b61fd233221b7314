"""From a URL to a tier that works."""

from pathlib import Path

import pytest

from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.store.opening import StoreOptions, check_tier, shown_url, tier_of, try_store
from tests.transfer.store.stores import stop


@pytest.mark.parametrize(
    ("url", "tier"),
    [
        ("file:///var/cache/kv", "files"),
        ("redis://h:6379/0", "redis"),
        ("rediss://u:p@h", "redis"),
        ("unix:///run/redis.sock", "redis"),
    ],
)
def test_the_scheme_says_which_tier(url, tier):
    assert tier_of(url) == tier


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket", "not a store"),
        ("", "not a store"),
        ("file://relative/path", "absolute"),
        ("file:", "absolute"),
        ("redis://", "host"),
        ("redis://:hush@h:port", "cannot be read"),
        ("redis://[::hush", "cannot be read"),
    ],
)
def test_other_urls_are_refused_without_being_repeated(url, words):
    with pytest.raises(ValueError, match=words) as error:
        tier_of(url)
    assert "hush" not in str(error.value)


def test_people_see_no_password():
    assert shown_url("redis://user:hush@h:6379/0?password=hush") == "redis://h:6379/0"
    assert shown_url("file:///a/b") == "file:///a/b"


def test_a_value_goes_there_and_back_and_nothing_stays(kind):
    check_tier(kind.tier, stop())
    assert kind.raw() == {}


def test_a_store_that_gives_back_something_else_is_found_out(kind):
    kind.tier.get = lambda *_: b"other"
    with pytest.raises(PullError) as error:
        check_tier(kind.tier, stop())
    assert error.value.reason is Reason.CORRUPT


def test_a_folder_that_others_may_write_into_is_no_store(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(PullError) as error:
        try_store(StoreOptions(url=f"file://{tmp_path}"), stop())
    assert error.value.reason is Reason.NO_PATH


def open_descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_trying_leaves_no_descriptor_behind(tmp_path):
    before = open_descriptors()
    try_store(StoreOptions(url=f"file://{tmp_path}/new%20folder"), stop())
    assert open_descriptors() == before
    assert (tmp_path / "new folder").is_dir()
