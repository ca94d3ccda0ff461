"""GLM-5 744B, Z.ai's chat model with 256 experts and sparse attention."""

model = dict(path="zai-org/GLM-5")
architecture = dict(
    model_type="glm_moe_dsa",
    num_hidden_layers=78,
    hidden_size=6144,
    intermediate_size=12288,
    num_attention_heads=64,
    num_key_value_heads=64,
    vocab_size=154880,
    tie_word_embeddings=False,
    max_position_embeddings=202752,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    n_routed_experts=256,
    n_shared_experts=1,
    first_k_dense_replace=3,
)
