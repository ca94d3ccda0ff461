"""Qwen2 0.5B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen2-0.5B", chat_template="chatml")
architecture = dict(
    _base_="qwen2_1_5b", num_hidden_layers=24, hidden_size=896, intermediate_size=4864, num_attention_heads=14
)
