"""A reward model from InternLM2-Chat-1.8B-SFT with QLoRA as XTuner trains it."""

_base_ = "internlm2_chat_1_8b_sft_reward_qlora_ultrafeedback_e1"

optim_wrapper = dict(optimizer=dict(lr=1e-4))
