"""Where completions come from: engines beside the trainer, their weights, and which sampled a batch. Nothing here imports TRL."""
