"""Qwen3.5 35B-A3B, Alibaba's chat model with 256 experts, 3B active; its text half."""

model = dict(path="Qwen/Qwen3.5-35B-A3B")
architecture = dict(
    _base_="qwen3_5_122b_a10b",
    num_hidden_layers=40,
    hidden_size=2048,
    num_attention_heads=16,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    linear_num_value_heads=32,
)
