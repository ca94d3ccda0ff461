"""Qwen3.5 397B-A17B, Alibaba's chat model with 512 experts, 17B active; its text half."""

model = dict(path="Qwen/Qwen3.5-397B-A17B")
architecture = dict(
    model_type="qwen3_5_moe_text",
    num_hidden_layers=60,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=256,
    vocab_size=248320,
    tie_word_embeddings=False,
    max_position_embeddings=262144,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=1024,
    shared_expert_intermediate_size=1024,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=64,
)
