"""InternLM2.5-20B-Chat on alpaca as XTuner trains it: a step each micro-batch."""

_base_ = "internlm2_5_chat_20b_qlora_alpaca_e3"

optim_wrapper = dict(accumulative_counts=1)
