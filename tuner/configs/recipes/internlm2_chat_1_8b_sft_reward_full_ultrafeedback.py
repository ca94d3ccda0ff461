"""A reward model from InternLM2-Chat-1.8B-SFT as XTuner trains it: micro-batches of 4 pairs."""

_base_ = "internlm2_chat_1_8b_sft_reward_full_ultrafeedback_e1"

train_dataloader = dict(batch_size=4)
