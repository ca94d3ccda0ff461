"""InternLM2-Chat 1.8B SFT, Shanghai AI Laboratory's small chat model before reinforcement learning."""

model = dict(path="internlm/internlm2-chat-1_8b-sft", chat_template="internlm2")
architecture = "internlm2_1_8b"
