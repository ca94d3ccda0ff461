"""What is done with a run's result: it stands above the worker, whose models and templates it reads."""
