"""The GPUs as the rest of the agent sees them: summary, status, series, letting go."""

import json
import os
import signal
from contextlib import asynccontextmanager

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from nearkv.agent.gpu.metrics import GpuCollector
from nearkv.agent.gpu.service import HOLD_LABEL, HOLD_SIGNAL, GpuService, plan_of
from nearkv.agent.gpu.settings import GpuSettings
from nearkv.health import Readiness
from tests.agent.gpu.conftest import plan_for, until
from tests.agent.gpu.kubelet import Kubelet, container, plugin_devices, pod, pod_list, serving
from tests.doubles.nvml.hosts import GIB, H100_BYTES, hosts_with, mig_host, mig_uuid_of, uuid_of


@asynccontextmanager
async def running(double, socket=None, **settings):
    settings = GpuSettings(
        library_dir=double.library_dir,
        pod_resources_socket=socket,
        pod_resources_interval_seconds=0.02,
        **settings,
    )
    service = GpuService(settings, plan=plan_for(double))
    async with service.running(Readiness("agent")):
        yield service
    assert double.holders() == []


async def test_summaries(nvml, short_path):
    host = hosts_with(3)
    host["devices"][1]["memory"]["used"] = 60 * GIB
    host["devices"][2]["remapped_rows"] = {"failure": 1}
    kubelet = Kubelet()
    kubelet.pods = pod_list(pod("engine", container(plugin_devices("nvidia.com/gpu", uuid_of(1)))))
    socket = short_path / "kubelet.sock"
    async with serving(kubelet, socket), running(nvml(host), socket) as service:
        assert service.summaries() is None
        service.pod_uid_of = lambda pod: {"default/engine": "uid-1"}.get(str(pod))
        await until(service.summaries)
        await until(lambda: service.summaries()[1].pod_uid)
        free, busy, failed = service.summaries()
    assert (free.id, free.health, free.pod_uid) == (uuid_of(0), "ok", None)
    assert (free.total_bytes, free.used_bytes) == (H100_BYTES, GIB // 2)
    assert (busy.used_bytes, busy.pod_uid) == (60 * GIB + GIB // 2, "uid-1")
    assert (failed.health, failed.why) == ("failed", "row remapping has failed")
    assert msgspec.json.decode(msgspec.json.encode(free))["id"] == uuid_of(0)


async def test_a_gpu_that_is_gone_is_failed_and_the_others_are_not(nvml):
    double = nvml(hosts_with(2))
    async with running(double) as service:
        await until(service.summaries)
        double.change(lambda host: host["devices"][0].update(lost=True))
        await until(lambda: service.summaries()[0].health == "failed")
        gone, sound = service.summaries()
        assert "gpu_lost" in gone.why
        assert gone.used_bytes is None
        assert sound.health == "ok"
        assert service.problems() == [f"GPU 0 ({uuid_of(0)}) failed: {gone.why}"]


async def test_mig_devices_are_what_pods_get(nvml):
    async with running(nvml(mig_host())) as service:
        await until(service.summaries)
        ids = [summary.id for summary in service.summaries()]
        assert ids == [mig_uuid_of(0, 0), mig_uuid_of(0, 1), uuid_of(1)]
        assert service.summaries()[1].used_bytes == 10 * GIB


@pytest.mark.parametrize(("xid", "health"), [(31, "ok"), (79, "failed"), (94, "ok")])
async def test_xids_decide_on_health_by_settings(nvml, xid, health):
    double = nvml(hosts_with(1))
    async with running(double, ignored_xids=(31, 94)) as service:
        await until(service.summaries)
        double.raise_xid(0, xid)
        await until(lambda: service.watch.history.xid_counts)
        assert service.summaries()[0].health == health


async def test_sigusr1_lets_go_for_a_while(nvml):
    double = nvml(hosts_with(1))
    async with running(double, release_seconds=0.3) as service:
        await until(service.summaries)
        os.kill(os.getpid(), signal.SIGUSR1)
        await until(lambda: service.missing)
        assert str(service.missing) == "released (SIGUSR1)"
        assert service.summaries() is None
        await until(service.summaries)
        assert double.calls() == {"init": 2, "shutdown": 1}


async def test_a_second_sigusr1_begins_the_time_anew(nvml):
    double = nvml(hosts_with(1))
    async with running(double, release_seconds=3600.0) as service:
        await until(service.summaries)
        os.kill(os.getpid(), signal.SIGUSR1)
        first = await until(lambda: service._reopening)
        os.kill(os.getpid(), signal.SIGUSR1)
        second = await until(lambda: service._reopening if first.cancelled() else None)
        assert second.when() > first.when()
        await until(lambda: not double.holders() and not service._releases)
        service.resume(HOLD_SIGNAL)
        await until(service.summaries)


async def test_the_label_of_a_driver_upgrade(nvml):
    double = nvml(hosts_with(1))
    async with running(double) as service:
        await until(service.summaries)
        await service.follow_upgrade("upgrade-required")
        assert double.holders()
        for state in ("pod-deletion-required", "drain-required", "pod-restart-required"):
            await service.follow_upgrade(state)
            assert service.watch.holds == (HOLD_LABEL,)
            assert double.holders() == []
        await service.follow_upgrade("upgrade-done")
        await until(service.summaries)


async def test_off_reads_nothing_and_survives_the_signal(nvml):
    double = nvml(hosts_with(1))
    async with running(double, enabled="off") as service:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert service.summaries() is None
        assert str(service.missing) == "off"
        assert service.describe()["devices"] == []
    assert double.calls() == {}


async def test_the_status_has_every_field_and_every_reason(nvml, short_path):
    kubelet = Kubelet()
    kubelet.pods = pod_list(pod("one", container(plugin_devices("nvidia.com/gpu", uuid_of(1)))))
    kubelet.allocatable = pod_list(plugin_devices("nvidia.com/gpu", uuid_of(1), mig_uuid_of(0, 1)))
    socket = short_path / "kubelet.sock"
    double = nvml(mig_host())
    async with serving(kubelet, socket), running(double, socket) as service:
        await until(lambda: service.summaries() and not service.describe()["pods_missing"])
        double.raise_xid(1, 79)
        await until(lambda: service.describe()["devices"][1]["xids"])
        told = json.loads(json.dumps(service.describe()))
    split, whole = told["devices"]
    assert whole["pods"] == ["default/one"]
    assert (whole["allocatable"], split["allocatable"]) == (True, False)
    assert [part["allocatable"] for part in split["mig_instances"]] == [False, True]
    assert split["reasons"]["utilisation"] == "mig"
    assert (whole["health"], whole["why"]) == ("failed", "Xid 79")
    assert whole["xids"][0]["xid"] == 79
    assert whole["memory"]["reserved_bytes"] == GIB // 2
    assert told["pairs"][0]["ancestor"] == "numa_node"
    for device in told["devices"]:
        nulls = {name for name, value in device.items() if value is None} - {"gone"}
        assert nulls == nulls & set(device["reasons"])


async def test_without_a_reading_the_status_says_why(nvml):
    double = nvml(hosts_with(1) | {"fail": {"nvmlInitWithFlags": 18}})
    async with running(double) as service:
        await until(lambda: service.watch.ends)
        told = service.describe()
    assert told["missing"].startswith("driver_mismatch")
    assert (told["devices"], told["age_seconds"], told["driver_version"]) == ([], None, None)


async def test_series(nvml):
    host = mig_host()
    host["devices"][1]["fail"] = {"nvmlDeviceGetPowerUsage": 999}
    double = nvml(host)
    registry = CollectorRegistry()
    async with running(double) as service:
        registry.register(GpuCollector(service))
        await until(service.summaries)
        double.raise_xid(1, 79)
        await until(lambda: service.watch.history.xid_counts)
        text = generate_latest(registry).decode()
    labels = f'{{gpu="{uuid_of(1)}",index="1"}}'
    assert f"nearkv_agent_gpu_memory_total_bytes{labels} 8.5899" in text
    assert f"nearkv_agent_gpu_healthy{labels} 0.0" in text
    assert f"nearkv_agent_gpu_nvlinks_active{labels} 18.0" in text
    assert f"nearkv_agent_gpu_utilisation_ratio{labels} 0.0" in text
    assert f'nearkv_agent_gpu_xids_total{{gpu="{uuid_of(1)}",xid="79"}} 1.0' in text
    assert 'nearkv_agent_gpu_missing_fields_total{field="power_watts",reason="failed"}' in text
    assert f'nearkv_agent_gpu_power_watts{{gpu="{uuid_of(1)}"' not in text
    assert f'nearkv_agent_gpu_utilisation_ratio{{gpu="{uuid_of(0)}"' not in text  # MIG
    assert "nearkv_agent_gpu_nvml_opens_total 1.0" in text


def test_settings_reach_the_plan(tmp_path):
    settings = GpuSettings(interval_seconds=2.5, library_dir=tmp_path)
    plan = plan_of(settings)
    assert (plan.interval_seconds, plan.library_dir) == (2.5, tmp_path)
