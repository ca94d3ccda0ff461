"""How a run starts and is watched."""
