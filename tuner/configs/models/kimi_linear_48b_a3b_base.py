"""Kimi Linear 48B-A3B Base, Moonshot AI's hybrid base model with 256 experts, 3B active."""

model = dict(path="moonshotai/Kimi-Linear-48B-A3B-Base")
architecture = dict(
    model_type="kimi_linear",
    num_hidden_layers=27,
    hidden_size=2304,
    intermediate_size=9216,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=163840,
    tie_word_embeddings=False,
    max_position_embeddings=1048576,
    num_experts_per_tok=8,
    moe_intermediate_size=1024,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_shared_experts=1,
    num_local_experts=256,
)
