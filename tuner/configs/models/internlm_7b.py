"""InternLM 7B, Shanghai AI Laboratory's first base model."""

model = dict(path="internlm/internlm-7b", chat_template="internlm")
architecture = dict(
    model_type="internlm",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    vocab_size=103168,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
)
