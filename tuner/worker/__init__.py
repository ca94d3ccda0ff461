"""One rank. It reads the run directory and nothing else, so every rank and every restart sees the same bytes."""
