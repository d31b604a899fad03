"""`scripts/check_tasks`: run solutions of a dataset's tasks through the verifier used in training."""
