"""DeepSeek V2 236B Chat, DeepSeek's chat model with 160 experts, 21B active."""

model = dict(path="deepseek-ai/DeepSeek-V2-Chat")
architecture = dict(
    model_type="deepseek_v2",
    num_hidden_layers=60,
    hidden_size=5120,
    intermediate_size=12288,
    num_attention_heads=128,
    num_key_value_heads=128,
    vocab_size=102400,
    tie_word_embeddings=False,
    max_position_embeddings=163840,
    num_experts_per_tok=6,
    moe_intermediate_size=1536,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=160,
    n_shared_experts=2,
    first_k_dense_replace=1,
)
