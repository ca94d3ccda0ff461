"""DeepSeek Coder 1.3B, DeepSeek's base model for code."""

model = dict(path="deepseek-ai/deepseek-coder-1.3b-base", chat_template="deepseek_coder")
architecture = dict(
    _base_="deepseek_coder_33b_base",
    num_hidden_layers=24,
    hidden_size=2048,
    intermediate_size=5504,
    num_attention_heads=16,
    num_key_value_heads=16,
)
