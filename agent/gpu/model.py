"""What is known of a node's GPUs (pure): each value is there, or its reason is.

``reasons`` of a struct holds, for each of its fields that is ``None``, why. Structs travel as
msgpack from the process that reads to the agent.
"""

import msgspec

from nearkv.agent.gpu.reasons import Missing

Reasons = dict[str, Missing]


class Memory(msgspec.Struct, frozen=True):
    """A device's memory. Under NVML's version 2 ``used_bytes`` is without ``reserved_bytes``.

    ``reserved_bytes`` is ``None`` where only version 1 is known, whose ``used_bytes`` has both.
    """

    total_bytes: int
    free_bytes: int
    used_bytes: int
    reserved_bytes: int | None = None


class Utilisation(msgspec.Struct, frozen=True):
    """Share of the last sampling period in which kernels ran, or memory was read or written."""

    gpu_ratio: float
    memory_ratio: float


class RemappedRows(msgspec.Struct, frozen=True):
    """Rows of memory that were replaced. ``pending`` ends with a reset, ``failure`` never."""

    corrected: int
    uncorrected: int
    pending: bool
    failure: bool


class MigMode(msgspec.Struct, frozen=True):
    """Whether a device is split by MIG, now and after the next reset."""

    enabled: bool
    pending: bool


class Fabric(msgspec.Struct, frozen=True):
    """The device's place in an NVLink domain of several hosts.

    ``problems`` are the complaints of the health mask; ``summary`` is its own verdict where the
    driver has one. ``status`` is an ``nvmlReturn_t``, of use once ``state`` is completed.
    """

    state: str
    status: int
    cluster_uuid: str
    clique_id: int
    problems: tuple[str, ...] = ()
    summary: str | None = None

    @property
    def clique(self) -> str:
        """The clique as the node label ``nvidia.com/gpu.clique`` writes it."""
        return f"{self.cluster_uuid}.{self.clique_id}"


class NvLink(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One NVLink of a device, and what is at its other end."""

    link: int
    active: bool
    version: int | None = None
    remote_type: str | None = None
    remote_bus_id: str | None = None
    reasons: Reasons = msgspec.field(default_factory=dict)


class MigInstance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One MIG device: what a pod gets of a GPU that is split."""

    index: int
    uuid: str | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    memory: Memory | None = None
    process_count: int | None = None
    reasons: Reasons = msgspec.field(default_factory=dict)


class Device(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU. ``gone`` says that it answers no more; values are the last ones known then.

    ``bus_id`` is written as sysfs does. ``numa_node`` is that of its PCIe slot;
    ``memory_numa_node`` that of its own memory, on platforms where it is one (Grace).
    ``ecc_uncorrected`` counts since the driver was loaded, ``ecc_uncorrected_ever`` always.
    ``clock_reasons`` are why its clocks are below their maximum.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    bus_id: str | None = None
    minor: int | None = None
    numa_node: int | None = None
    memory_numa_node: int | None = None
    memory: Memory | None = None
    utilisation: Utilisation | None = None
    process_count: int | None = None
    ecc_uncorrected: int | None = None
    ecc_uncorrected_ever: int | None = None
    remapped_rows: RemappedRows | None = None
    clock_reasons: tuple[str, ...] | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    mig: MigMode | None = None
    mig_instances: tuple[MigInstance, ...] | None = None
    fabric: Fabric | None = None
    gone: Missing | None = None
    reasons: Reasons = msgspec.field(default_factory=dict)

    @property
    def id(self) -> str:
        """The UUID, or the place in NVML's list where it has none."""
        return self.uuid or f"nvml-index-{self.index}"


class DevicePair(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How two devices of the node reach each other; ``a`` and ``b`` are :attr:`Device.id`.

    ``ancestor`` is the lowest part of the PCIe tree that they share. ``p2p_read`` and
    ``p2p_nvlink`` are ``ok``, or why not.
    """

    a: str
    b: str
    ancestor: str | None = None
    p2p_read: str | None = None
    p2p_nvlink: str | None = None
    reasons: Reasons = msgspec.field(default_factory=dict)


class Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="reading"):
    """One look at all GPUs. ``seconds`` is how long it took.

    ``events`` says why there is no word of Xids, ``None`` where there would be.
    """

    devices: tuple[Device, ...]
    pairs: tuple[DevicePair, ...] = ()
    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_version: str | None = None
    events: Missing | None = None
    seconds: float = 0.0
    reasons: Reasons = msgspec.field(default_factory=dict)


class Xid(msgspec.Struct, frozen=True, tag="xid"):
    """The driver reported an error of a device (NVIDIA calls these Xid); ``code`` is which."""

    device: str
    code: int
