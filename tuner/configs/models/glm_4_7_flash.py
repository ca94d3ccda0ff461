"""GLM-4.7 Flash 30B-A3B, Z.ai's small chat model with 64 experts that can think first."""

model = dict(path="zai-org/GLM-4.7-Flash")
architecture = dict(
    model_type="glm4_moe_lite",
    num_hidden_layers=47,
    hidden_size=2048,
    intermediate_size=10240,
    num_attention_heads=20,
    num_key_value_heads=20,
    vocab_size=154880,
    tie_word_embeddings=False,
    max_position_embeddings=202752,
    num_experts_per_tok=4,
    moe_intermediate_size=1536,
    q_lora_rank=768,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    n_routed_experts=64,
    n_shared_experts=1,
)
