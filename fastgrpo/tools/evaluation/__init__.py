"""`fastgrpo eval`: pass@1 of a saved model or adapter."""
