"""Entry point of a mover: ``python -m nearkv.agent.movers FD``, started by the agent only."""

from nearkv.agent.movers.program import main

if __name__ == "__main__":
    main()
