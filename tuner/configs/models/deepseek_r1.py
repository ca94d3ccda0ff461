"""DeepSeek R1 671B, DeepSeek's chat model that thinks first, 37B active; 8-bit weights."""

model = dict(path="deepseek-ai/DeepSeek-R1")
architecture = "deepseek_v3"
