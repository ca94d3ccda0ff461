"""The models that tuner serves itself; importing this package registers them with transformers' Auto classes."""

from __future__ import annotations

from transformers import dynamic_module_utils

from tuner.models import internlm as internlm

# Where TRL or PEFT load a model without a word about its code, transformers 5.24 asks the terminal for 15 s: "Do you
# wish to run the custom code?" A run has nobody to answer, and trust is given by a flag alone; 0 refuses at once.
dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
