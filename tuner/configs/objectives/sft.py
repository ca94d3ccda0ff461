"""Supervised fine-tuning: the loss is taken on the assistant's turns alone. The default; not written in names."""
