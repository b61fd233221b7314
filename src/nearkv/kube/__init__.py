"""Kubernetes: reaching the API server, reading objects by LIST and WATCH, patching one."""
