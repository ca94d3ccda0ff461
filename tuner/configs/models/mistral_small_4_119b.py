"""Mistral Small 4 119B, Mistral AI's chat model with 128 experts that also sees; its text half."""

model = dict(path="mistralai/Mistral-Small-4-119B-2603")
architecture = dict(
    model_type="mistral4",
    num_hidden_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=131072,
    tie_word_embeddings=False,
    max_position_embeddings=1048576,
    num_experts_per_tok=4,
    moe_intermediate_size=2048,
    q_lora_rank=1024,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=128,
    n_shared_experts=1,
)
