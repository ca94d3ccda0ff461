"""DeepSeek V3 0324 671B, DeepSeek's chat model with 256 experts, 37B active; 8-bit weights."""

model = dict(path="deepseek-ai/DeepSeek-V3-0324")
architecture = "deepseek_v3"
