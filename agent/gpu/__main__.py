"""``python -m nearkv.agent.gpu``: the process that reads GPUs, started by the agent."""

from nearkv.agent.gpu.program import main

if __name__ == "__main__":
    main()
