"""On what: the GPUs that are there, the libraries, and which of all processes this one is."""
