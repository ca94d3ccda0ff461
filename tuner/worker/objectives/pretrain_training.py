"""Continued pretraining: SFT's trainer. The rows differ, which have loss on every token."""

from tuner.worker.objectives.sft_training import TRAINING as TRAINING
