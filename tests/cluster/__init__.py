"""Scheduling with real etcd, kube-apiserver and kube-scheduler, where ``KUBE_BIN_DIR`` has them."""
