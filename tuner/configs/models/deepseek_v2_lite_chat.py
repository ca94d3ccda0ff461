"""DeepSeek V2 Lite 16B Chat, DeepSeek's chat model with 64 experts, 2.4B active."""

model = dict(path="deepseek-ai/DeepSeek-V2-Lite-Chat")
architecture = "deepseek_v2_lite"
