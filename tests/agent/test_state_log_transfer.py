"""What the log tells of transfers: with each engine, how its KV moves; of pairs, what it costs."""

from nearkv.agent.state_log import StateLog
from nearkv.state.codec import FrameReader
from nearkv.state.model import EngineInfo, PathReading, TransferInfo

MOVES = TransferInfo(mode="agent", compat="c", agent="http://a")


def log_of(abilities):
    return StateLog(
        boot="b", node="n", version="1", transfer_of=lambda info: abilities.get(info.id)
    )


def info(engine="e"):
    return EngineInfo(id=engine, incarnation="1", url="http://e")


def path(source="s", seconds=1.0):
    return PathReading(
        source=source, target="n", path="tcp", setup_seconds=seconds, bytes_per_second=1e9
    )


def read(frame):
    (decoded,) = FrameReader().feed(frame)
    return decoded


def begin(log):
    return read(next(log.snapshot(iter(()), now=0.0)))


def test_whoever_publishes_an_engine_says_how_its_kv_moves():
    abilities = {"e": MOVES}
    log = log_of(abilities)
    log.put_info(info())
    assert read(log.seal()).engines[0].transfer == MOVES
    log.put_info(info())
    assert log.seal() is None


def test_an_engine_is_published_anew_when_its_transfer_changes_and_not_otherwise():
    abilities = {}
    log = log_of(abilities)
    log.refresh_info("e")
    log.put_info(info())
    log.seal()
    log.refresh_info("e")
    assert log.seal() is None
    abilities["e"] = MOVES
    log.refresh_info("e")
    assert read(log.seal()).engines[0].transfer == MOVES
    del abilities["e"]
    log.refresh_info("e")
    assert read(log.seal()).engines[0].transfer is None


def test_a_paths_cost_goes_out_once_with_a_delta_and_with_every_snapshot():
    log = log_of({})
    log.put_path(path(), now=0.0)
    assert log.has_pending
    assert read(log.seal()).paths == (path(),)
    log.put_path(path(), now=0.0)
    assert not log.has_pending
    log.put_path(path(seconds=2.0), now=0.0)
    log.put_path(path(seconds=3.0), now=0.0)
    log.put_path(path("t"), now=0.0)
    assert set(read(log.seal()).paths) == {path(seconds=3.0), path("t")}
    assert set(begin(log).paths) == {path(seconds=3.0), path("t")}


def test_a_forgotten_pair_is_in_no_snapshot():
    log = log_of({})
    log.put_path(path(), now=0.0)
    log.drop_path("s", "n")
    log.drop_path("nobody", "n")
    assert log.seal() is None
    assert begin(log).paths == ()
