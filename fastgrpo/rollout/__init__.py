"""Where completions come from: engines beside the trainer, their weights, and which sampled a batch. Imports no TRL."""
