"""Kimi K2 Instruct 1T-A32B, Moonshot AI's chat model with 384 experts; remote code only; sizes from memory."""

model = dict(path="moonshotai/Kimi-K2-Instruct", remote_code=True)
architecture = dict(
    model_type="deepseek_v3",
    num_hidden_layers=61,
    hidden_size=7168,
    intermediate_size=18432,
    num_attention_heads=64,
    num_key_value_heads=64,
    vocab_size=163840,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=384,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
