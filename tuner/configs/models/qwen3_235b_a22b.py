"""Qwen3 235B-A22B, Alibaba's chat model with 128 experts, 22B active, that can think first."""

model = dict(path="Qwen/Qwen3-235B-A22B")
architecture = dict(
    _base_="qwen3_30b_a3b",
    num_hidden_layers=94,
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=64,
    moe_intermediate_size=1536,
)
