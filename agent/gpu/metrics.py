"""Prometheus series of the node's GPUs, read when scraped."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearkv.agent.gpu.model import Device, Memory
from nearkv.agent.gpu.service import GpuService
from nearkv.agent.gpu.summarising import taken_bytes

_PREFIX = "nearkv_agent_gpu_"
_LABELS = ("gpu", "index")
_Values = Callable[[Device], float | None]


def _of_memory(read: Callable[[Memory], int]) -> _Values:
    return lambda device: None if device.memory is None else read(device.memory)


def _active_nvlinks(device: Device) -> float | None:
    return None if device.nvlinks is None else sum(link.active for link in device.nvlinks)


_GAUGES: tuple[tuple[str, str, _Values], ...] = (
    ("memory_total_bytes", "Memory of the GPU.", _of_memory(lambda memory: memory.total_bytes)),
    (
        "memory_taken_bytes",
        "Memory that a new process cannot have: used by any process, or reserved.",
        _of_memory(taken_bytes),
    ),
    (
        "utilisation_ratio",
        "Share of time in which kernels ran; absent under MIG.",
        lambda device: None if device.utilisation is None else device.utilisation.gpu_ratio,
    ),
    ("processes", "Processes that compute on the GPU.", lambda device: device.process_count),
    ("power_watts", "Power drawn.", lambda device: device.power_watts),
    ("temperature_celsius", "Temperature.", lambda device: device.temperature_celsius),
    ("nvlinks_active", "NVLinks that are up.", _active_nvlinks),
    ("pcie_width", "PCIe lanes in use.", lambda device: device.pcie_width),
)


class GpuCollector(Collector):
    """Turns the last reading into series; what is unknown has no sample."""

    def __init__(self, service: GpuService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield all series of the GPUs."""
        yield from self._device_families()
        yield self._health_family()
        yield from self._reader_families()
        yield self._xid_family()

    def _device_families(self) -> Iterator[Metric]:
        for name, text, read in _GAUGES:
            family = GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for device in self._service.devices():
                value = read(device)
                if value is not None and device.gone is None:
                    family.add_metric([device.id, str(device.index)], float(value))
            yield family

    def _health_family(self) -> Metric:
        family = GaugeMetricFamily(
            f"{_PREFIX}healthy",
            "1 where the GPU can be used, 0 where it has failed or is gone; absent if not known.",
            labels=_LABELS,
        )
        for device in self._service.devices():
            health = self._service.verdict_of(device).health
            if health != "unknown":
                family.add_metric([device.id, str(device.index)], float(health == "ok"))
        return family

    def _xid_family(self) -> Metric:
        family = CounterMetricFamily(
            f"{_PREFIX}xids", "Errors that the driver reported.", labels=("gpu", "xid")
        )
        for (device, code), count in self._service.watch.history.xid_counts.items():
            family.add_metric([device, str(code)], count)
        return family

    def _reader_families(self) -> Iterator[Metric]:
        watch = self._service.watch
        reading = watch.reading
        age = GaugeMetricFamily(
            f"{_PREFIX}reading_seconds", "How long the last reading of all GPUs took."
        )
        if reading is not None:
            age.add_metric([], reading.seconds)
        yield age
        released = GaugeMetricFamily(
            f"{_PREFIX}nvml_released", "1 while NVML is closed on purpose.", value=bool(watch.holds)
        )
        yield released
        yield CounterMetricFamily(
            f"{_PREFIX}nvml_opens", "How often NVML was opened.", value=watch.opened
        )
        ends = CounterMetricFamily(
            f"{_PREFIX}reader_failures", "Ends of the process that reads.", labels=("reason",)
        )
        for reason, count in watch.ends.items():
            ends.add_metric([reason], count)
        yield ends
        fields = CounterMetricFamily(
            f"{_PREFIX}missing_fields",
            "Values that a reading did not have, by field and reason.",
            labels=("field", "reason"),
        )
        for (field, reason), count in watch.missing_fields.items():
            fields.add_metric([field, reason], count)
        yield fields
        pods = CounterMetricFamily(
            f"{_PREFIX}pod_resources_failures",
            "Questions to the kubelet that failed.",
            labels=("reason",),
        )
        if self._service.pods is not None:
            for reason, count in self._service.pods.failures.items():
                pods.add_metric([reason], count)
        yield pods
