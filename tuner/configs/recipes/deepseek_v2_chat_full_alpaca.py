"""DeepSeek-V2-Chat on alpaca as XTuner trains it: half the learning rate, a step each micro-batch."""

_base_ = "deepseek_v2_chat_full_alpaca_e3"

optim_wrapper = dict(optimizer=dict(lr=1e-5), accumulative_counts=1)
