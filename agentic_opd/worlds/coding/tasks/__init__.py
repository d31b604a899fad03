"""Sources of tasks: the built-in tasks and datasets, their formats, and the evaluation split."""
