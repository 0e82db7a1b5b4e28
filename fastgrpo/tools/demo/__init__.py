"""`fastgrpo demo`: GRPO training of a small model on a CPU, in minutes, with its reward and pass@1 to look at."""
