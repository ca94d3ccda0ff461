"""Llama-2-7B on WizardLM as XTuner trains it: micro-batches of 2."""

_base_ = "llama2_7b_full_wizardlm_e1"

train_dataloader = dict(batch_size=2)
