"""Qwen1.5 MoE A2.7B Chat, Alibaba's chat model of 14B with 60 experts, 2.7B active."""

model = dict(path="Qwen/Qwen1.5-MoE-A2.7B-Chat")
architecture = dict(_base_="qwen1_5_moe_a2_7b", max_position_embeddings=32768)
