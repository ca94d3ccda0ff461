"""Qwen3.5 397B-A17B, Alibaba's chat model with 512 experts, 17B active; its text half."""

model = dict(path="Qwen/Qwen3.5-397B-A17B")
architecture = dict(
    _base_="qwen3_5_122b_a10b", num_hidden_layers=60, hidden_size=4096, num_experts=512, num_experts_per_tok=10
)
