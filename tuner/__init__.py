"""From a fine-tuning recipe's name to a correctly configured DeepSpeed run."""

__version__ = "0.1.0"
