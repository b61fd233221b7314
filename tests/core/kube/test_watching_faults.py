"""A watch on an API server that misbehaves: it recovers, says why, and never forgets."""

from dataclasses import replace

import pytest

from nearkv.kube.access import AccessLimits, ApiAccess
from nearkv.kube.credentials import from_kubeconfig
from nearkv.kube.listing import ListLimits
from nearkv.kube.objects import PODS_PATH, WORKER_STATUSES_PATH, Pod, WorkerStatus
from tests.core.kube.following import QUICK, following
from tests.doubles.api_server import (
    ApiServerConfig,
    ApiServerDouble,
    Faults,
    node_object,
    pod_object,
)

NODES = {f"n{number}" for number in range(8)}


@pytest.fixture
async def api():
    async with ApiServerDouble(ApiServerConfig(bookmark_seconds=0.05)) as double:
        double.put_all(node_object(name) for name in sorted(NODES))
        yield double


async def test_tokens_of_pages_that_grow_old_begin_the_list_anew(api):
    api.inject(Faults(verbs=("list",), skip=1, status=410, reason="Expired", times=2))
    async with following(api) as followed:
        assert followed.replaced == [sorted(NODES)]
        assert followed.watch.failures == {"expired": 2}
        asked = ["continue" in seen.query for seen in api.record.all("list")]
        # The fault lets the first request pass, then hits two: a second page and a first one.
        assert asked == [False, True, False, False, True, True]


async def test_a_version_that_is_too_old_is_listed_anew(api):
    async with following(api) as followed:
        api.kill()
        api.delete("Node", "n0")
        api.put(node_object("new"))
        api.compact()
        await api.start()
        await followed.until_in_step()
        assert followed.watch.failures["expired"] == 1
        assert followed.watch.lists == 2
        assert followed.events == []  # it came by the list


async def test_an_error_event_of_expiry_is_listed_anew(api):
    api.inject(Faults(verbs=("watch",), error_event=(410, "Expired"), times=1))
    async with following(api) as followed:
        assert followed.watch.failures == {"expired": 1}
        assert followed.watch.lists == 2


async def test_other_error_events_resume_and_list_anew_only_if_they_go_on(api):
    api.inject(Faults(verbs=("watch",), error_event=(500, "InternalError"), times=3))
    async with following(api) as followed:
        assert followed.watch.failures == {"server_error": 3}
        assert followed.watch.lists == 1
        api.inject(Faults(verbs=("watch",), error_event=(500, "InternalError"), times=5))
        api.break_connections()
        await followed.until(lambda: followed.watch.lists == 2)


async def test_a_stalled_socket_is_left_and_the_changes_missed_come(api):
    """Row 19 of the table of issues: recovered within one deadline of silence."""
    async with following(api) as followed:
        api.inject(Faults(stall=True))
        api.put(node_object("missed"))
        await followed.until(lambda: followed.watch.failures.get("silent") == 1)
        api.inject(Faults())
        await followed.until_in_step()
        assert followed.events == [("ADDED", "missed")]
        assert (followed.watch.failures, followed.watch.lists) == ({"silent": 1}, 1)


async def test_a_server_without_bookmarks_and_news_is_listed_now_and_then(api):
    api.inject(Faults(without_bookmarks=True))
    limits = replace(QUICK, silence_seconds=0.2)
    async with following(api, limits=limits) as followed:
        await followed.until(lambda: followed.watch.lists == 2)
        assert followed.watch.failures["silent"] >= 2
        assert followed.names == NODES


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_a_server_that_does_not_answer_is_given_up_on(api, verb):
    api.inject(Faults(verbs=(verb,), hang=True, times=1))
    async with following(api) as followed:
        assert followed.watch.failures == {"silent": 1}
        assert followed.names == NODES


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_retry_after_is_kept_to(api, verb):
    api.inject(Faults(verbs=(verb,), status=429, retry_after_seconds=1, times=1))
    async with following(api) as followed:
        refused, again = api.record.all(verb)[:2]
        assert refused.status == 429
        assert again.at - refused.at >= 1
        assert followed.watch.failures == {"throttled": 1}


async def test_a_broken_line_is_never_taken(api):
    async with following(api) as followed:
        api.inject(Faults(truncate_event=True))
        api.put(node_object("cut"))
        await followed.until_in_step()
        assert followed.events == [("ADDED", "cut")]
        assert followed.watch.failures == {"truncated": 1}
        assert followed.watch.lists == 1


async def test_a_line_that_is_no_event_breaks_the_watch_and_nothing_is_missed(api):
    async with following(api) as followed:
        api.inject(Faults(garbage_line=True))
        api.put(node_object("new"))
        await followed.until_in_step()
        assert followed.events == [("ADDED", "new")]
        assert followed.watch.failures == {"garbage": 1}


async def test_events_of_an_unknown_type_are_passed_over(api):
    async with following(api) as followed:
        api.inject(Faults(unknown_type=True))
        api.put(node_object("new"))
        await followed.until_in_step()
        assert len(api.record.all("watch")) == 1
        assert followed.watch.failures == {"garbage": 1}


async def test_a_huge_object_passes(api):
    async with following(api) as followed:
        api.put(node_object("huge", annotations={"blob": "x" * 1_400_000}))
        await followed.until_in_step()
        assert len(followed.objects["huge"].annotations["blob"]) == 1_400_000
        assert followed.watch.failures == {}


async def test_an_object_over_the_limit_is_refused_without_a_busy_loop(api):
    limits = replace(QUICK, line_bytes=10_000)
    async with following(api, limits=limits) as followed:
        api.put(node_object("huge", annotations={"blob": "x" * 100_000}))
        # The list has no such limit, so that it arrives in the end.
        await followed.until_in_step()
        assert followed.watch.failures["too_large"] == limits.pauses.doubts_in_a_row
        assert followed.watch.lists == 2


@pytest.mark.parametrize(
    ("faults", "trouble"),
    [
        (Faults(status=500), "server_error"),
        (Faults(status=503), "server_error"),
        (Faults(status=302), "refused"),
        (Faults(status=400), "refused"),
        (Faults(status=401), "unauthorized"),
        (Faults(status=403), "forbidden"),
        (Faults(status=404), "not_found"),
        (Faults(body=b"{}"), "garbage"),
        (Faults(body=b"<html>"), "garbage"),
        (Faults(body=b'{"kind":"NodeList","metadata":{},"items":[]}'), "garbage"),
        (Faults(cut_after_bytes=100), "unreachable"),
        (Faults(hang=True), "silent"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_a_list_that_failed_is_no_empty_list(api, faults, trouble):
    """Row 16 of the table of issues."""
    async with following(api) as followed:
        api.kill()
        api.put(pod_object("newer"))
        api.compact()  # a list will be needed
        await api.start()
        api.inject(replace(faults, verbs=("list",)))
        await followed.until(lambda: followed.watch.failures.get(trouble, 0) >= 2)
        assert followed.names == NODES
        assert followed.watch.problem
        api.delete("Node", "n0")
        api.inject(Faults())
        await followed.until_in_step()
        assert [len(names) for names in followed.replaced] == [8, 7]
        await followed.until(lambda: followed.watch.problem == "")


async def test_objects_of_another_form_are_no_empty_list(api):
    def refuse(raw):
        raise ValueError("another form")

    async with following(api, decode=refuse, synced=False) as followed:
        await followed.until(lambda: followed.watch.failures.get("garbage", 0) == 2)
        assert not followed.watch.synced
        assert followed.replaced == []


async def test_a_list_that_never_ends_does(api):
    listing = ListLimits(page_objects=1, total_seconds=0.5)
    api.put_all(node_object(f"more{number}") for number in range(3000))
    limits = replace(QUICK, listing=listing)
    async with following(api, limits=limits, synced=False) as followed:
        await followed.until(lambda: followed.watch.failures.get("silent", 0) >= 1)
        assert not followed.watch.synced


async def test_a_page_that_leads_to_itself_is_refused(api):
    body = b'{"metadata":{"resourceVersion":"5","continue":"again"},"items":[]}'
    api.inject(Faults(verbs=("list",), body=body))
    async with following(api, synced=False) as followed:
        await followed.until(lambda: followed.watch.failures.get("garbage", 0) >= 1)
        assert followed.replaced == []


async def test_a_restart_of_the_server_is_resumed(api):
    async with following(api) as followed:
        for number in range(3):
            api.kill()
            api.put(node_object(f"new{number}"))
            await followed.until(lambda: bool(followed.watch.problem))
            await api.start()
            await followed.until_in_step()
        assert followed.watch.lists == 1
        assert set(followed.watch.failures) == {"unreachable"}
        assert followed.events == [("ADDED", f"new{number}") for number in range(3)]


async def test_a_server_that_is_away_at_first_is_waited_for(api):
    api.kill()
    async with following(api, synced=False) as followed:
        await followed.until(lambda: followed.watch.failures.get("unreachable", 0) > 3)
        assert not followed.watch.synced
        await api.start()
        await followed.until_in_step()


async def test_a_store_restored_from_a_backup_is_noticed(api):
    """Versions went back: the server waits for ours without a word, bookmarks included."""
    for number in range(20):
        api.edit("Node", "n0", {"metadata": {"labels": {"a": str(number)}}})
    async with following(api, limits=replace(QUICK, silence_seconds=0.2)) as followed:
        api.delete("Node", "n1")
        api.restore_backup(5)
        await followed.until(lambda: followed.watch.lists == 2)
        await followed.until_in_step()
        assert followed.names == NODES - {"n1"}
        assert followed.watch.failures["silent"] >= 2


async def test_a_cached_list_asks_the_store_where_the_cache_cannot_tell(api):
    api.put(pod_object("p", node="n1"))
    limits = replace(QUICK, silence_seconds=0.2)
    async with following(api, PODS_PATH, Pod, cached=True, limits=limits) as followed:
        api.restore_backup(5)
        await followed.until(lambda: followed.watch.lists == 2)
        await followed.until_in_step("Pod")
        first, refused, again = api.record.all("list")[:3]
        assert first.query["resourceVersion"] == "0"
        assert int(refused.query["resourceVersion"]) > 5
        assert refused.status == 504
        assert "resourceVersion" not in again.query
        assert again.query["limit"]


async def test_a_watch_that_is_closed_at_once_is_no_busy_loop(api):
    api.inject(Faults(verbs=("watch",), close_at_once=True))
    pauses = replace(QUICK.pauses, short_watch_seconds=1, first_pause_seconds=0.05)
    async with following(api, limits=replace(QUICK, pauses=pauses), synced=False) as followed:
        await followed.until(lambda: followed.watch.failures.get("closed_early", 0) >= 6)
        first, *_, last = api.record.all("watch")
        assert last.at - first.at >= 5 * 0.025
        assert followed.watch.lists == 2


async def test_a_custom_resource_that_is_not_installed_may_come_later(api):
    api.inject(Faults(resources=("workerstatuses",), status=404))
    async with following(api, WORKER_STATUSES_PATH, WorkerStatus, synced=False) as followed:
        await followed.until(lambda: followed.watch.failures.get("not_found", 0) >= 2)
        assert not followed.watch.synced
        api.inject(Faults())
        await followed.watch.wait_until_synced()


async def test_a_rotated_token_is_taken_up(api, tmp_path):
    path = tmp_path / "kubeconfig"
    api.write_kubeconfig(path, token="old")  # noqa: S106 (the double's)
    api.accept_tokens("old")
    access = ApiAccess(from_kubeconfig(str(path)), limits=AccessLimits(reload_seconds=0.05))
    async with following(api, access=access) as followed:
        api.write_kubeconfig(path, token="new")  # noqa: S106 (the double's)
        api.accept_tokens("new")
        api.break_connections()
        await followed.until(lambda: bool(followed.watch.failures.get("unauthorized")))
        api.put(node_object("new"))
        await followed.until_in_step()
        assert followed.watch.lists == 1


async def test_cancelled_anywhere_it_leaves_nothing(api):
    for faults in (Faults(), Faults(verbs=("list",), hang=True), Faults(stall=True)):
        api.inject(faults)
        async with following(api, synced=False):
            await api.wait_until(lambda: len(api.record) > 0)
        await api.wait_until(lambda: api.open_watches == 0)
        api.record.clear()
