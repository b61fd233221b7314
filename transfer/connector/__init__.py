"""What the vLLM connector does, without vLLM: leases at P, lookups and loads at D (pure).

``vllm_connector`` next to this package is the thin shell that vLLM sees.
"""
