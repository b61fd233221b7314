"""The check's own logic, with a driver that exists in Python only: it must be able to fail.

What the checks say of real devices only a GPU host can show.
"""

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from nearkv.transfer.cuda.driver import Driver
from tests.gpu import checks, engine_checks
from tests.gpu.check import ITEMS, Item, Run, main
from tests.gpu.player import Player
from tests.gpu.results import (
    Outcome,
    Result,
    SkippedError,
    WrongError,
    exit_code,
    line_of,
    write_results,
)
from tests.gpu.stage import ProcessPeer, checked
from tests.transfer.cuda.fake_cuda import Machine

SIZES = checks.Sizes(shared_bytes=1 << 20, held_bytes=1 << 20, layers=4, block_bytes=4096)


HAS_DRIVER = Path("/dev/nvidiactl").exists()


class LocalPeer:
    """A player in this process, with a driver of its own."""

    def __init__(self, machine, spoil):
        self.library = machine.process()
        spoil(self.library)
        driver = Driver(self.library)
        driver.initialise()
        self._player = Player(load=lambda: driver)
        self._fds = []
        self._dead = False

    def ask(self, command, fds=(), **fields):
        if self._dead:
            raise WrongError(f"{command}: the process is gone")
        theirs = [os.dup(fd) for fd in fds]
        try:
            answer, ours = self._player.answer(command, json.loads(json.dumps(fields)), theirs)
        except SkippedError:
            raise
        except Exception as error:  # noqa: BLE001 (as a player in a process does)
            return checked({"error": f"{command}: {error}"}, [])
        finally:
            for fd in theirs:
                os.close(fd)
        self._fds.extend(ours)
        return checked(json.loads(json.dumps(answer)), [os.dup(fd) for fd in ours])

    def kill(self):
        self._dead = True
        self.library.die()
        for fd in self._fds:
            os.close(fd)

    def close(self):
        if not self._dead:
            self._player.close()


def leave(_library):
    """Spoil nothing."""


class LocalStage:
    """Players in this process; ``spoil`` gets each player's library first."""

    def __init__(self, machine, spoil=leave):
        self.machine = machine
        self._spoil = spoil
        self.isolated = 0

    @contextmanager
    def player(self, kind="plain", *, isolated=False):
        if kind != "plain":
            raise SkippedError(f"no {kind} here")
        self.isolated += isolated
        peer = LocalPeer(self.machine, self._spoil)
        try:
            yield peer
        finally:
            peer.close()


@pytest.fixture
def machine():
    machine = Machine()
    yield machine
    machine.check()


@pytest.fixture
def lines():
    return []


@pytest.fixture
def make_run(machine, lines):
    def make(spoil=leave, **options):
        return Run(LocalStage(machine, spoil), SIZES, tell=lines.append, **options)

    return make


ALONE = [
    item
    for item in ITEMS
    if item.name not in ("movers", "torch-hook", "readiness", "nixl", "nixl-split-pid")
]


@pytest.mark.parametrize("item", ALONE, ids=lambda item: item.name)
def test_a_device_that_works_passes(make_run, lines, item):
    run = make_run()
    run.make(item)
    (result,) = run.results
    assert result.outcome is (Outcome.PASSED if item.required else Outcome.FOUND), lines
    assert exit_code(run.results) == 0


FAULTS = {
    "sharing": {"cuMemCreate": 2, "cuMemAlloc_v2": 2},
    "descriptors": {"cuMemImportFromShareableHandle": 1},
    "descriptors-split-pid": {"cuMemExportToShareableHandle": 801},
    "device-copies": {"cuMemcpyDtoDAsync_v2": 1},
    "staged-tcp": {"cuMemAllocHost_v2": 2},
    "pinned-memfd": {"cuMemHostRegister_v2": 801},
    "killed-engine": {"cuMemImportFromShareableHandle": 1},
    "held-descriptor": {"cuMemCreate": 2},
}


@pytest.mark.parametrize("item", [i for i in ALONE if i.required], ids=lambda item: item.name)
def test_a_device_that_does_not_work_fails_and_says_where(make_run, item):
    run = make_run(lambda library: library.fail.update(FAULTS[item.name]))
    run.make(item)
    (result,) = run.results
    assert result.outcome is Outcome.FAILED
    assert any(call in result.detail for call in FAULTS[item.name])
    assert exit_code(run.results) == 1


@pytest.mark.parametrize("name", ["ipc-handles", "ipc-handles-split-pid"])
def test_what_is_only_asked_cannot_fail(make_run, name):
    run = make_run(lambda library: library.fail.update(cuIpcOpenMemHandle_v2=400))
    run.make(next(item for item in ITEMS if item.name == name))
    (result,) = run.results
    assert result.outcome is Outcome.FOUND
    assert "does not work: open: cuIpcOpenMemHandle_v2" in result.detail
    assert exit_code(run.results) == 0


def test_checks_of_pods_start_isolated_processes(machine):
    stage = LocalStage(machine)
    checks.check_descriptors_split(stage, SIZES)
    assert stage.isolated == 4
    stage = LocalStage(machine)
    checks.check_descriptors(stage, SIZES)
    assert stage.isolated == 0


def lose_a_byte(library):
    """Have every copy on the device be a byte too short."""
    copy = type(library)._cuMemcpyDtoDAsync_v2

    def shortened(target, source, size, stream):
        size.value -= 1
        return copy(library, target, source, size, stream)

    library.cuMemcpyDtoDAsync_v2 = shortened


def test_bytes_that_are_lost_in_a_copy_are_noticed(make_run):
    run = make_run(lose_a_byte)
    run.make(Item("device-copies", checks.check_device_copies))
    (result,) = run.results
    assert result.outcome is Outcome.FAILED
    assert "other bytes" in result.detail


def test_memory_that_is_not_shared_but_copied_is_noticed(machine, make_run):
    """The reader gets memory of its own with the same bytes: a change is not seen there."""

    def private(library):
        imported = type(library)._cuMemImportFromShareableHandle

        def copied(handle, fd, kind):
            code = imported(library, handle, fd, kind)
            shared = library.handles[handle._obj.value]
            twin = library._new(len(shared.bytes), shared.device, exportable=True)
            twin.bytes[:] = shared.bytes
            machine.release(shared)
            library.handles[handle._obj.value] = twin
            return code

        library.cuMemImportFromShareableHandle = copied

    run = make_run(private)
    run.make(Item("descriptors", checks.check_descriptors))
    (result,) = run.results
    assert (result.outcome, "after a change" in result.detail) == (Outcome.FAILED, True)


def test_memory_that_does_not_come_back_is_noticed(machine, make_run, monkeypatch):
    monkeypatch.setattr(checks, "_RETURN_SECONDS", 0.1)
    release = machine.release
    kept = []

    def leak(physical):
        if physical.references == 1 and len(physical.bytes) == SIZES.held_bytes:
            kept.append(physical)
        else:
            release(physical)

    machine.release = leak
    run = make_run()
    run.make(Item("killed-engine", checks.check_killed_engine))
    (result,) = run.results
    assert (result.outcome, "after the reader let go" in result.detail) == (Outcome.FAILED, True)
    for physical in kept:
        release(physical)


@pytest.mark.parametrize("name", ["torch-hook", "readiness", "nixl", "nixl-split-pid"])
def test_what_is_not_installed_is_skipped_with_the_reason(make_run, lines, name):
    run = make_run()
    run.make(next(item for item in ITEMS if item.name == name))
    (result,) = run.results
    assert (result.outcome, result.detail[:3]) == (Outcome.SKIPPED, "no ")
    assert "skipped" in lines[0]
    assert exit_code(run.results) == 0


@pytest.mark.skipif(HAS_DRIVER, reason="movers here find a driver")
def test_movers_that_find_no_driver_fail_the_check(make_run):
    run = make_run()
    run.make(Item("movers", engine_checks.check_movers))
    (result,) = run.results
    assert result.outcome is Outcome.FAILED
    assert "no CUDA driver here" in result.detail


def test_a_check_that_is_broken_fails_and_the_next_is_made(make_run):
    def broken(stage, sizes):
        raise KeyError("oops")

    run = make_run()
    run.make(Item("broken", broken))
    run.make(Item("sharing", checks.check_sharing))
    assert [result.outcome for result in run.results] == [Outcome.FAILED, Outcome.PASSED]
    assert "KeyError" in run.results[0].detail
    assert exit_code(run.results) == 1


def test_checks_that_come_too_late_have_failed(make_run):
    run = make_run(seconds=0)
    run.make(Item("sharing", checks.check_sharing))
    (result,) = run.results
    assert (result.outcome, result.detail) == (Outcome.FAILED, "no time was left for it")


def test_without_a_gpu_it_says_so_and_exits_with_2(capsys, tmp_path):
    def load():
        driver = Driver(Machine(devices=0).process())
        driver.initialise()
        return driver

    output = tmp_path / "check.json"
    assert main(["--output", str(output)], load=load) == 2
    assert capsys.readouterr().out.startswith("no GPU here: cuDeviceGet: CUDA error 101")
    assert not output.exists()


def test_a_run_is_written_down(capsys, tmp_path, machine):
    """Players find no driver in their processes, so that what is run here fails."""

    def load():
        driver = Driver(machine.process())
        driver.initialise()
        return driver

    output = tmp_path / "deep" / "check.json"
    code = main(["--output", str(output), "--only", "sharing", "nixl"], load=load)
    content = json.loads(output.read_text())
    assert content["device"]["name"] == "Fake 0"
    names = [check["name"] for check in content["checks"]]
    assert names == ["sharing", "nixl"]
    assert content["passed"] == (code == 0)
    if not HAS_DRIVER:
        assert code == 1
        assert content["checks"][0]["outcome"] == "failed"
    assert "sharing" in capsys.readouterr().out


FAILED = Result("c", required=True, outcome=Outcome.FAILED, seconds=2.0)


def test_a_line_shows_figures_and_detail():
    result = replace(
        FAILED, name="copies", outcome=Outcome.PASSED, detail="fine",
        figures={"gb_per_s": 1234.5, "x": 0.5},
    )  # fmt: skip
    assert line_of(result).split() == (
        ["copies", "passed", "required", "2.0s", "gb_per_s", "1,234;", "x", "0.5;", "fine"]
    )


def test_only_required_failures_fail_a_run(tmp_path):
    optional = replace(FAILED, required=False)
    skipped = replace(FAILED, outcome=Outcome.SKIPPED)
    assert exit_code([optional, skipped]) == 0
    assert exit_code([optional, FAILED]) == 1
    write_results(tmp_path / "r.json", {}, [FAILED])
    assert json.loads((tmp_path / "r.json").read_text())["passed"] is False


def test_processes_answer_say_what_is_wrong_and_end():
    """The real thing, with a player that needs no device."""
    peer = ProcessPeer((sys.executable, "-m", "tests.gpu.roles", "plain"), 0)
    try:
        assert peer.ask("pid")["pid"] != os.getpid()
        with pytest.raises(WrongError, match="do_dance"):
            peer.ask("dance")
        peer.kill()
        with pytest.raises(WrongError, match="gone or silent"):
            peer.ask("pid")
    finally:
        peer.close()
