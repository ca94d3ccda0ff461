"""Measurements of tuner beside what else people run; `python -m bench NAME` runs one."""
