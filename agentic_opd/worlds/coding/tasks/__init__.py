"""Where tasks come from: the built-in ones and datasets, their formats, and the split for evaluation."""
