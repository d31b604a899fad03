"""What all tests share."""

from hypothesis import HealthCheck, settings

# Tests share their two cores with whatever else runs; a slow example is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
