"""Movers: disposable processes that map engine memory and copy, and the pool that runs them.

The agent's main process maps nothing and loads no native transport. It starts one *pull*
mover per engine rank that takes KV, one *serving* mover per rank whose KV readers of other
nodes take, and throw-away movers to probe transports. A mover's exit is the unmap, and its
death is a failed pull, never a dead agent or engine::

    agent (asyncio)                          mover (blocking threads)
      pool -> handle -> process, channel  =>   program -> pulling, serving -> backends
                   messages over a socket pair, descriptors beside them

``pool`` is the API; everything else is its inside.
"""
