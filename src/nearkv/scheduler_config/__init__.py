"""What kube-scheduler makes of a KubeSchedulerConfiguration with our extender (pure).

``linting.lint`` is the way in. What kube-scheduler does was observed on 1.36 and read in its
validation; it decodes strictly, so that one wrong letter keeps it from starting.
"""
