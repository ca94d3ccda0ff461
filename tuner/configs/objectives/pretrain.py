"""Continued pre-training: the loss is taken on every token of plain text."""

objective = dict(type="pretrain")
