"""A reward model: it scores answers, and learns from pairs."""

objective = dict(type="reward")
