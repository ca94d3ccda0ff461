"""DeepSeek V3.2-Exp 672B, DeepSeek's first chat model with sparse attention, 37B active; 8-bit weights."""

model = dict(path="deepseek-ai/DeepSeek-V3.2-Exp")
architecture = dict(
    model_type="deepseek_v32",
    num_hidden_layers=61,
    hidden_size=7168,
    intermediate_size=18432,
    num_attention_heads=128,
    num_key_value_heads=128,
    vocab_size=129280,
    tie_word_embeddings=False,
    max_position_embeddings=163840,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    first_k_dense_replace=3,
)
