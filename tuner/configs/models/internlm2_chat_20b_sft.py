"""InternLM2-Chat 20B SFT, Shanghai AI Laboratory's larger chat model before reinforcement learning."""

model = dict(path="internlm/internlm2-chat-20b-sft", chat_template="internlm2")
architecture = "internlm2_20b"
