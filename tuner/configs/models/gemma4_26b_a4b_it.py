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
    moe_intermediate_size=704,
    global_head_dim=512,
    num_global_key_value_heads=2,
    attention_k_eq_v=True,
    top_k_experts=8,
    enable_moe_block=True,
    hidden_size_per_layer_input=0,
)
