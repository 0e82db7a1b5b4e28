"""What a person runs: the command line, the demo, the run log, pass@1."""
