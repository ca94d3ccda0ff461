"""InternLM2 20B, Shanghai AI Laboratory's larger base model, trained on text."""

model = dict(path="internlm/internlm2-20b", chat_template="internlm2")
architecture = dict(
    _base_="internlm2_7b", num_hidden_layers=48, hidden_size=6144, intermediate_size=16384, num_attention_heads=48
)
