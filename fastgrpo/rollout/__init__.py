"""Where completions come from: llama.cpp, and which weights sampled a batch. Nothing here imports TRL."""
