"""DeepSeek V2 Lite 16B, DeepSeek's base model with 64 experts, 2.4B active."""

model = dict(path="deepseek-ai/DeepSeek-V2-Lite", chat_template="deepseek")
architecture = dict(
    model_type="deepseek_v2",
    num_hidden_layers=27,
    hidden_size=2048,
    intermediate_size=10944,
    num_attention_heads=16,
    num_key_value_heads=16,
    vocab_size=102400,
    tie_word_embeddings=False,
    max_position_embeddings=163840,
    num_experts_per_tok=6,
    moe_intermediate_size=1408,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=64,
    n_shared_experts=2,
    first_k_dense_replace=1,
)
