"""Phi-3-mini-128k on alpaca as XTuner trains it: samples as long as the context."""

_base_ = "phi3_mini_128k_instruct_qlora_alpaca_e3"

train_dataloader = dict(dataset=dict(max_length=131072))
