"""Gemma 4 26B-A4B Instruct, Google's chat model that also sees, with 128 experts; its text half."""

model = dict(path="google/gemma-4-26B-A4B-it")
architecture = dict(
    model_type="gemma4_text",
    num_hidden_layers=30,
    hidden_size=2816,
    intermediate_size=2112,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=256,
    vocab_size=262144,
    tie_word_embeddings=True,
    max_position_embeddings=262144,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=704,
    full_attention_interval=6,
    global_head_dim=512,
    num_global_key_value_heads=2,
    attention_k_eq_v=True,
)
