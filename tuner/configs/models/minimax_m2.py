"""MiniMax M2 229B-A10B, MiniMax's chat model with 256 experts that thinks first; 8-bit weights."""

model = dict(path="MiniMaxAI/MiniMax-M2")
architecture = dict(
    model_type="minimax_m2",
    num_hidden_layers=62,
    hidden_size=3072,
    intermediate_size=1536,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=200064,
    tie_word_embeddings=False,
    max_position_embeddings=196608,
    num_experts_per_tok=8,
    num_local_experts=256,
)
