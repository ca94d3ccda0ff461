"""DeepSeek V3.2-Exp 672B, DeepSeek's first chat model with sparse attention, 37B active; 8-bit weights."""

model = dict(path="deepseek-ai/DeepSeek-V3.2-Exp")
architecture = dict(_base_="deepseek_v3", model_type="deepseek_v32")
