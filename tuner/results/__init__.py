"""Uses a run's result: export, merge, chat, evaluate, serve. It may import the worker's models and templates."""
