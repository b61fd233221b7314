"""Light active probes of the paths between nodes.

What moving KV costs is learnt from real transfers; probes fill in where there were none. They
are rare, small, and give way to everything else.
"""
