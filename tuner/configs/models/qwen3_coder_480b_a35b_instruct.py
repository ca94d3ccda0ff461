"""Qwen3 Coder 480B-A35B Instruct, Alibaba's chat model for code with 160 experts, 35B active."""

model = dict(path="Qwen/Qwen3-Coder-480B-A35B-Instruct")
architecture = dict(
    _base_="qwen3_30b_a3b",
    num_hidden_layers=62,
    hidden_size=6144,
    intermediate_size=8192,
    num_attention_heads=96,
    num_key_value_heads=8,
    max_position_embeddings=262144,
    num_experts=160,
    moe_intermediate_size=2560,
)
