"""Where the time goes, and whether prefill should be separated from decode (``nearkv report``).

Metrics of ingress, agents and engines in, answers out: what cannot be known is said to be unknown
and why, never zero.
"""
