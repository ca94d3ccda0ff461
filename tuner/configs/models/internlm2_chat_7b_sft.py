"""InternLM2-Chat 7B SFT, Shanghai AI Laboratory's chat model before reinforcement learning."""

model = dict(path="internlm/internlm2-chat-7b-sft", chat_template="internlm2")
architecture = "internlm2_7b"
