"""The kube-scheduler extender: scores nodes by distance to the KV cache and GPU headroom."""
