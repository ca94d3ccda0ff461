"""Llama-2-70B on WizardLM as XTuner trains it: 3 epochs, whatever its name says, for batches of 128 on 32 GPUs."""

_base_ = "llama2_70b_full_wizardlm_e3"

optim_wrapper = dict(accumulative_counts=4)
