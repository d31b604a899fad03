"""`scripts/check_tasks`: solutions of a dataset's tasks, run through the verifier of training."""
