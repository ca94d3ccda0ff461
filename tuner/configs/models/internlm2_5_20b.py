"""InternLM2.5 20B, Shanghai AI Laboratory's larger base model of the second generation's update."""

model = dict(path="internlm/internlm2_5-20b", chat_template="internlm2")
architecture = dict(
    model_type="internlm2",
    num_hidden_layers=48,
    hidden_size=6144,
    intermediate_size=16384,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=92544,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
