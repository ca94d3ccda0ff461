"""A pretrained model and real text, to try learning, chat, evaluation and export on: `make real` prepares them once.

Nothing here is part of the package. The model comes from the package registry, and the rows from Python itself.
"""
