"""DeepSeek-R1 Distill Llama 8B, Llama 3.1 taught to think by DeepSeek-R1."""

model = dict(path="deepseek-ai/DeepSeek-R1-Distill-Llama-8B")
architecture = "llama3_1_8b"
