"""Benchmarks: `python -m bench head` and `python -m bench update`. See bench/README.md."""
