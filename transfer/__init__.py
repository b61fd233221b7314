"""KV transfer between engines and the vLLM connector that feeds it."""
