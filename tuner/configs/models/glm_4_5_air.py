"""GLM-4.5 Air 106B-A12B, Z.ai's chat model with 128 experts that can think first."""

model = dict(path="zai-org/GLM-4.5-Air")
architecture = dict(
    model_type="glm4_moe",
    num_hidden_layers=46,
    hidden_size=4096,
    intermediate_size=10944,
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151552,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
    attention_bias=True,
    num_experts_per_tok=8,
    moe_intermediate_size=1408,
    n_routed_experts=128,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
