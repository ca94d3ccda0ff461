"""What a run leaves behind: its directory and its checkpoints."""
