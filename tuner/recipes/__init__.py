"""What to train: recipes read as data, composed by name, checked and overridden."""
