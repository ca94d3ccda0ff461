"""Train all weights."""
