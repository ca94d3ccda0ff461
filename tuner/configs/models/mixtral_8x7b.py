"""Mixtral 8x7B, Mistral AI's base model with 8 experts, 13B active."""

model = dict(path="mistralai/Mixtral-8x7B-v0.1", chat_template="mistral")
architecture = dict(
    model_type="mixtral",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
    num_experts_per_tok=2,
    num_local_experts=8,
)
