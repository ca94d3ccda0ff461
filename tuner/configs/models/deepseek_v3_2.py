"""DeepSeek V3.2 672B, DeepSeek's chat model with sparse attention, 37B active; 8-bit weights."""

model = dict(path="deepseek-ai/DeepSeek-V3.2")
architecture = "deepseek_v3_2_exp"
