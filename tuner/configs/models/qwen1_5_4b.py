"""Qwen1.5 4B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen1.5-4B", chat_template="chatml")
architecture = dict(
    _base_="qwen1_5_7b",
    num_hidden_layers=40,
    hidden_size=2560,
    intermediate_size=6912,
    num_attention_heads=20,
    num_key_value_heads=20,
)
