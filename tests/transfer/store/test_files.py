"""The file tier: its bound, what does not belong to it, and disks that are full."""

import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.store import files
from nearkv.transfer.store.files import FileTier
from tests.transfer.store.stores import Engine, is_root, layout, prefix, stop

KEYS = [f"{i:02x}" * 20 for i in range(16)]
VALUE = bytes(range(256)) * 4
BOUND = 4 * len(VALUE)


@pytest.fixture
def make_tier(tmp_path):
    tiers = []

    def make(folder=tmp_path / "store", max_bytes=BOUND, **options):
        tiers.append(FileTier(folder, max_bytes=max_bytes, **options))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def refused(reason, call, *arguments):
    with pytest.raises(PullError) as error:
        call(*arguments)
    assert error.value.reason is reason
    return str(error.value)


def there(tier):
    return [i for i, there in enumerate(tier.present(KEYS, stop())) if there]


def age(folder, tier):
    """Give what is there times of its own: 1, 2, ... in the order of the keys."""
    for i in there(tier):
        os.utime(folder / "store" / KEYS[i][:2] / f"{KEYS[i]}.kvsp", (i + 1, i + 1))


def test_the_least_recently_used_goes_first(make_tier, tmp_path):
    tier = make_tier()
    for key in KEYS[:4]:
        tier.put(key, [VALUE], stop())
    age(tmp_path, tier)
    assert tier.get(KEYS[0], len(VALUE), stop()) == VALUE  # a read is a use
    assert tier.touch(KEYS[1], stop())
    tier.put(KEYS[4], [VALUE], stop())
    tier.put(KEYS[5], [VALUE], stop())
    assert there(tier) == [0, 1, 4, 5]


def test_the_bound_holds_for_all_writers_together_at_every_moment(make_tier, tmp_path, monkeypatch):
    seen = []
    looker = make_tier()
    write = files._write

    def watched(*arguments):
        with looker._lock(stop()):
            store = tmp_path / "store"
            seen.append(sum(file.stat().st_size for file in store.glob("??/*")))
        write(*arguments)

    monkeypatch.setattr(files, "_write", watched)
    tiers = [make_tier(max_bytes=6 * len(VALUE)) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        puts = [pool.submit(tier.put, key, [VALUE], stop()) for key in KEYS for tier in tiers]
    assert [put.result() for put in puts] == [None] * 48
    assert len(seen) == 48
    assert max(seen) <= 6 * len(VALUE)
    # Of three who write the same value, two replace one for which they had room besides.
    assert 4 <= len(there(tiers[0])) <= 6


def test_what_others_are_writing_is_not_evicted(make_tier, tmp_path, monkeypatch):
    tier, other = make_tier(), make_tier()
    write = files._write
    outcomes = []

    def nested(*arguments):
        monkeypatch.setattr(files, "_write", write)
        # The other's value is half written now and has its room already.
        outcomes.append(refused(Reason.STORE_FULL, other.put, KEYS[1], [VALUE * 4], stop()))
        write(*arguments)

    monkeypatch.setattr(files, "_write", nested)
    tier.put(KEYS[0], [VALUE], stop())
    assert "no room" in outcomes[0]
    assert tier.get(KEYS[0], len(VALUE), stop()) == VALUE


def test_what_a_killed_writer_left_behind_goes(make_tier, tmp_path):
    program = (
        "import os, pathlib, sys\n"
        "from nearkv.transfer.backends.contract import Stop, monotonic_ms\n"
        "from nearkv.transfer.store import files\n"
        "files._write = lambda *arguments: os.kill(os.getpid(), 9)\n"
        "tier = files.FileTier(pathlib.Path(sys.argv[1]), max_bytes=4096)\n"
        f"tier.put({KEYS[0]!r}, [bytes(4000)], Stop(monotonic_ms() + 30_000))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, tmp_path / "store"], check=False)
    assert ended.returncode == -9
    [part] = (tmp_path / "store").glob("??/*.part")
    assert part.stat().st_size == 4000
    tier = make_tier()
    assert there(tier) == []
    tier.put(KEYS[1], [VALUE * 4], stop())
    assert there(tier) == [1]
    assert not part.exists()


def test_a_value_over_the_bound_is_refused_and_nothing_evicted(make_tier):
    tier = make_tier()
    tier.put(KEYS[0], [VALUE], stop())
    refused(Reason.TOO_LARGE, tier.put, KEYS[1], [VALUE] * 5, stop())
    assert there(tier) == [0]


def limited(bytes_):
    def set_limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, bytes_))

    return set_limit


def test_a_file_size_limit_means_full_and_leaves_nothing(make_tier, tmp_path):
    program = (
        "import pathlib, sys\n"
        "from nearkv.transfer.backends.contract import Stop, monotonic_ms\n"
        "from nearkv.transfer.errors import PullError\n"
        "from nearkv.transfer.store.files import FileTier\n"
        "tier = FileTier(pathlib.Path(sys.argv[1]), max_bytes=1 << 20)\n"
        "try:\n"
        f"    tier.put({KEYS[0]!r}, [bytes(100_000)], Stop(monotonic_ms() + 30_000))\n"
        "except PullError as error:\n"
        "    print(error.reason)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "store"],
        preexec_fn=limited(50_000), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stdout.strip() == Reason.STORE_FULL
    assert list((tmp_path / "store").glob("??/*")) == []


@pytest.fixture
def small_disk(tmp_path):
    if not is_root():
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)  # noqa: S607 (where it is differs)


def test_a_full_disk_is_named_and_nothing_half_written_stays(make_tier, small_disk):
    tier = make_tier(small_disk, max_bytes=1 << 30)
    memory = layout(block_bytes=16 << 10)  # a segment of 4 blocks is 128 KiB
    writer, reader = Engine(tier, memory, seed=1), Engine(tier, memory)
    report = writer.put(prefix(12), range(12))
    assert (report.blocks, report.reason) == (4, Reason.STORE_FULL)
    assert list(small_disk.glob("??/*.part")) == []
    assert len(list(small_disk.glob("??/*.kvsp"))) == 1
    assert reader.pull(prefix(12), range(12)).blocks == 4
    tier.close()


@pytest.mark.parametrize("what", ["link", "folder-link", "folder", "pipe"])
def test_what_is_no_plain_file_is_neither_followed_nor_read(make_tier, tmp_path, what):
    tier = make_tier()
    secret = tmp_path / "outside" / f"{KEYS[0]}.kvsp"
    secret.parent.mkdir()
    secret.write_bytes(VALUE)
    shard = tmp_path / "store" / KEYS[0][:2]
    place = shard / secret.name
    if what == "folder-link":
        shard.symlink_to(secret.parent)
    else:
        shard.mkdir()
        {
            "link": lambda: place.symlink_to(secret),
            "folder": place.mkdir,
            "pipe": lambda: os.mkfifo(place),
        }[what]()
    assert tier.get(KEYS[0], len(VALUE), stop()) is None
    assert not tier.touch(KEYS[0], stop())
    assert tier.present(KEYS[:1], stop()) == [False]
    if what in {"folder", "folder-link"}:
        refused(Reason.NO_PATH, tier.put, KEYS[0], [b"new"], stop())
    else:
        tier.put(KEYS[0], [b"new"], stop())
        assert tier.get(KEYS[0], 3, stop()) == b"new"
    assert secret.read_bytes() == VALUE
    assert not list(tmp_path.glob("*/*/*.part"))


def test_files_of_another_user_do_not_count(make_tier, tmp_path):
    if not is_root():
        pytest.skip("giving files away needs root")
    tier = make_tier()
    tier.put(KEYS[0], [VALUE], stop())
    os.chown(tmp_path / "store" / KEYS[0][:2] / f"{KEYS[0]}.kvsp", 12345, 12345)
    assert tier.get(KEYS[0], len(VALUE), stop()) is None


def test_other_files_in_the_folder_are_neither_counted_nor_touched(make_tier, tmp_path):
    tier = make_tier()
    tier.put(KEYS[0], [VALUE], stop())
    foreign = [tmp_path / "store" / name for name in ("notes.txt", "00/big.txt", "zz")]
    for file in foreign:
        file.write_bytes(bytes(10_000))
    for key in KEYS[1:6]:
        tier.put(key, [VALUE], stop())
    assert len(there(tier)) == 4
    assert all(file.stat().st_size == 10_000 for file in foreign)


def test_a_folder_that_others_may_write_into_is_refused(make_tier, tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PullError, match="others own it or may write") as error:
        make_tier(folder)
    assert error.value.reason is Reason.NO_PATH
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PullError, match="cannot be used"):
        make_tier(tmp_path / "link")


def test_only_our_user_may_read_what_is_stored(make_tier, tmp_path):
    make_tier().put(KEYS[0], [VALUE], stop())
    found = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
    assert {oct(path.stat().st_mode & 0o077) for path in found} == {"0o0"}


def test_a_folder_that_goes_away_is_a_clear_reason(make_tier, tmp_path):
    tier = make_tier()
    tier.put(KEYS[0], [VALUE], stop())
    for path in (tmp_path / "store").glob("??/*"):
        path.unlink()
    for path in sorted((tmp_path / "store").iterdir()):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "store").rmdir()
    assert tier.get(KEYS[0], 10, stop()) is None
    refused(Reason.NO_PATH, tier.put, KEYS[0], [VALUE], stop())


def test_waiting_for_the_lock_ends_by_the_deadline(make_tier):
    tier, other = make_tier(), make_tier()
    with other._lock(stop()):
        refused(Reason.DEADLINE, tier.put, KEYS[0], [VALUE], stop(0.05))
    tier.put(KEYS[0], [VALUE], stop())


def test_a_file_that_shrinks_while_it_is_read_gives_what_is_there(make_tier, tmp_path):
    tier = make_tier()
    tier.put(KEYS[0], [VALUE], stop())
    path = tmp_path / "store" / KEYS[0][:2] / f"{KEYS[0]}.kvsp"
    with path.open("rb") as file:
        assert files._read(file.fileno(), 2 * len(VALUE), stop()) == VALUE
