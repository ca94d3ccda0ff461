"""GLM-4.6 355B-A32B, Z.ai's chat model with 160 experts that can think first."""

model = dict(path="zai-org/GLM-4.6")
architecture = dict(
    model_type="glm4_moe",
    num_hidden_layers=92,
    hidden_size=5120,
    intermediate_size=12288,
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151552,
    tie_word_embeddings=False,
    max_position_embeddings=202752,
    attention_bias=True,
    use_qk_norm=True,
    num_experts_per_tok=8,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    n_shared_experts=1,
    first_k_dense_replace=3,
)
