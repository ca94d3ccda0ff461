"""Continued pre-training: the loss covers every token of plain text."""

objective = dict(type="pretrain")
