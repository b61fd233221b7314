"""A stand-in for kube-scheduler as an extender meets it: see ``scheduler.SchedulerDouble``.

It follows what was observed of kube-scheduler 1.36 (sequence of calls, sampling, how answers are
read, what wakes a rejected pod); its own scoring is minimal.
"""

from tests.doubles.scheduler.configuration import ExtenderConfig, SchedulerConfig
from tests.doubles.scheduler.cycling import Outcome, Placement
from tests.doubles.scheduler.scheduler import SchedulerDouble

__all__ = ["ExtenderConfig", "Outcome", "Placement", "SchedulerConfig", "SchedulerDouble"]
