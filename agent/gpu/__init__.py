"""The node's GPUs by NVML: read in a process of their own, mapped to pods (docs/adr/0011)."""
