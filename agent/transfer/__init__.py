"""KV transfer in the agent's main process: engines, leases, lookups, pulls, other agents.

Nothing here maps an engine's memory or loads a native transport; the movers do.
"""
