"""InternLM2.5-Chat 1.8B, Shanghai AI Laboratory's small chat model of the second generation's update."""

model = dict(path="internlm/internlm2_5-1_8b-chat", chat_template="internlm2")
architecture = dict(
    model_type="internlm2",
    num_hidden_layers=24,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=92544,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
