"""InternLM3 8B Instruct, Shanghai AI Laboratory's chat model of the third generation."""

model = dict(path="internlm/internlm3-8b-instruct")
architecture = dict(
    model_type="internlm3",
    num_hidden_layers=48,
    hidden_size=4096,
    intermediate_size=10240,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=128512,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
