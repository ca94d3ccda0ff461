"""Qwen3-Coder-Next, Alibaba's chat model for code, 80B with 512 experts, 3B active."""

model = dict(path="Qwen/Qwen3-Coder-Next")
architecture = dict(
    model_type="qwen3_next",
    num_hidden_layers=48,
    hidden_size=2048,
    intermediate_size=5120,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    vocab_size=151936,
    tie_word_embeddings=False,
    max_position_embeddings=262144,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
)
