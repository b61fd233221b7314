"""The OpenAI-compatible entry: routes each request to the engine that holds its KV cache."""
