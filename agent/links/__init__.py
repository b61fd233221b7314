"""The node's RDMA devices and network adapters, from sysfs: state, errors, nearness to GPUs."""
