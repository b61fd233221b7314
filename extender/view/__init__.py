"""What the extender sees of the cluster: nodes, pods and agents' summaries, as one snapshot.

- ``nodes``, ``pods``, ``summaries``, ``links``: what is known, by name (pure).
- ``columns``, ``building``: the same by row, published as a ``Snapshot`` (pure).
- ``collecting``, ``cluster``: where it comes from (HTTP, watches).
"""
