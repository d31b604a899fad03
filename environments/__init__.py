"""Launchable environments: a task source plus `config_init`, in the manner of Atropos."""
