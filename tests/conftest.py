"""What all tests share."""

import os

from hypothesis import HealthCheck, settings

# Before torch is imported, here and in the processes that tests start. Its threads wait for each other in busy loops:
# on two cores that other processes use too, two of them take ten times the processor time of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests share their two cores with whatever else runs; a slow example is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
