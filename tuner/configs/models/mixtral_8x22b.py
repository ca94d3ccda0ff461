"""Mixtral 8x22B, Mistral AI's base model with 8 experts, 39B active."""

model = dict(path="mistralai/Mixtral-8x22B-v0.1", chat_template="mistral")
architecture = dict(
    model_type="mixtral",
    num_hidden_layers=56,
    hidden_size=6144,
    intermediate_size=16384,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    tie_word_embeddings=False,
    max_position_embeddings=65536,
    num_experts_per_tok=2,
    num_local_experts=8,
)
