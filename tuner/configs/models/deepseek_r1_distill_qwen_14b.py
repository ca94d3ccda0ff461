"""DeepSeek-R1 Distill Qwen 14B, Qwen2.5 taught to think by DeepSeek-R1."""

model = dict(path="deepseek-ai/DeepSeek-R1-Distill-Qwen-14B")
architecture = "qwen2_5_14b"
