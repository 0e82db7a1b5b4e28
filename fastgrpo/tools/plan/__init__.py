"""`fastgrpo plan` and `fastgrpo.estimate_memory`: the memory of a run before it starts."""
