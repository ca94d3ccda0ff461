"""DeepSeek-R1 Distill Llama 70B, Llama 3.3 taught to think by DeepSeek-R1."""

model = dict(path="deepseek-ai/DeepSeek-R1-Distill-Llama-70B")
architecture = "llama3_1_70b"
