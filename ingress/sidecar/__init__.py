"""The decode-side sidecar: prefill elsewhere first, then the engine beside it."""
