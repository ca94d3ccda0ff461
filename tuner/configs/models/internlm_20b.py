"""InternLM 20B, Shanghai AI Laboratory's first larger base model."""

model = dict(path="internlm/internlm-20b", chat_template="internlm")
architecture = dict(
    _base_="internlm_7b",
    num_hidden_layers=60,
    hidden_size=5120,
    intermediate_size=13824,
    num_attention_heads=40,
    num_key_value_heads=40,
    max_position_embeddings=4096,
    bias=False,
)
