"""DeepSeek-R1 Distill Qwen 7B, Qwen2.5 Math taught to think by DeepSeek-R1."""

model = dict(path="deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")
architecture = "qwen2_7b"
