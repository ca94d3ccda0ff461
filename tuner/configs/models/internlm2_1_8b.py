"""InternLM2 1.8B, Shanghai AI Laboratory's small base model, trained on text."""

model = dict(path="internlm/internlm2-1_8b", chat_template="internlm2")
architecture = dict(
    _base_="internlm2_7b", num_hidden_layers=24, hidden_size=2048, intermediate_size=8192, num_attention_heads=16
)
