"""Qwen2 72B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen2-72B", chat_template="chatml")
architecture = dict(
    _base_="qwen2_7b",
    num_hidden_layers=80,
    hidden_size=8192,
    intermediate_size=29568,
    num_attention_heads=64,
    num_key_value_heads=8,
)
