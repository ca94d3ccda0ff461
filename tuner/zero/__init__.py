"""How DeepSpeed is set: reading, checking and merging its config."""
