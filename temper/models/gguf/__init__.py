"""Models that travel as GGUF files inside wheels."""
