"""Qwen3.5 35B-A3B, Alibaba's chat model with 256 experts, 3B active; its text half."""

model = dict(path="Qwen/Qwen3.5-35B-A3B")
architecture = dict(
    model_type="qwen3_5_moe_text",
    num_hidden_layers=40,
    hidden_size=2048,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    vocab_size=248320,
    tie_word_embeddings=False,
    max_position_embeddings=262144,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
)
