"""What vLLM's CPU build lacks, each in a file that can go when vLLM has it.

- `lora_kernels`: requests without an adapter beside requests with one.
- `seeded_sampling`: requests with a seed whose prompt is read in parts.
- `untie`: new weights for a model whose embeddings are tied.
- `gloo_transfer`: weight transfer between CPUs; vLLM's own is between GPUs.
"""
