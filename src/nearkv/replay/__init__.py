"""Replaying traces over a simulated fleet, with the router's own code (``nearkv replay``).

A discrete-event simulation: engines are models (:mod:`nearkv.replay.engine_model`), time is a
number, and the ingress's planner, index, ledger and cost policy are the real ones, with the
simulation's clock handed in.
"""
