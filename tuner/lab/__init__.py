"""Measuring and trying, beside the straight way of a run: tune, smoke, doctor, and starting on hosts over ssh."""
