"""When NVML has to be closed for a driver's upgrade (pure).

NVIDIA's GPU operator shows the progress of an upgrade in a label of the Node. The driver is
unloaded once the pods that use GPUs are gone; DaemonSets stay, and one that holds NVML open
makes the unloading fail (gpu-operator#2570).
"""

UPGRADE_LABEL = "nvidia.com/gpu-driver-upgrade-state"
_MAY_BE_OPEN = (
    "",
    "upgrade-required",
    "cordon-required",
    "wait-for-jobs-required",
    "uncordon-required",
    "upgrade-done",
)


def must_release(state: str | None) -> bool:
    """Tell whether NVML must be closed while the label has this value, ``None`` for no label.

    Values that are not known mean closed: all that is lost is readings. So does
    ``upgrade-failed``, where somebody is about to try again.
    """
    return (state or "") not in _MAY_BE_OPEN
