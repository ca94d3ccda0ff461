"""DeepSeek V3.1 671B, DeepSeek's chat model that can think first, 37B active; 8-bit weights."""

model = dict(path="deepseek-ai/DeepSeek-V3.1")
architecture = "deepseek_v3"
