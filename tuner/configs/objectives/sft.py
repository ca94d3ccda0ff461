"""Supervised fine-tuning: the loss covers only the assistant's turns. The default; left out of names."""
