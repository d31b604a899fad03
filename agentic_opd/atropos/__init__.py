"""Client of Atropos' trajectory API (`run-api`), over HTTP: for environments and gateways, and for a trainer.

In: scored groups. Out: the same groups at the API, each sent once under one registration, and a trainer's batches.
"""
