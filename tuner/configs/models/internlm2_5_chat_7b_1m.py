"""InternLM2.5-Chat 7B 1M, Shanghai AI Laboratory's chat model for long contexts."""

model = dict(path="internlm/internlm2_5-7b-chat-1m", chat_template="internlm2")
architecture = dict(
    model_type="internlm2",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=92544,
    tie_word_embeddings=False,
    max_position_embeddings=262144,
)
