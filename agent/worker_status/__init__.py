"""WorkerStatus objects: what the agent knows of engines in pods, rarely, for people and tools."""
