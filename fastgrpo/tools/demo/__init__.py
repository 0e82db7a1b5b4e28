"""`fastgrpo demo`: GRPO training of a small model in minutes on a CPU, or on a GPU, with its reward and pass@1 to look at."""
