"""KV transfer between engines: wire format, leases, memory layout, chunk plans.

Everything here is pure and free of vllm, torch and native transports, so that it can be
tested anywhere; transports and the vLLM connector come on top of it.
"""
