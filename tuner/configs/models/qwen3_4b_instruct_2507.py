"""Qwen3 4B Instruct 2507, Alibaba's chat model that answers without thinking first."""

model = dict(path="Qwen/Qwen3-4B-Instruct-2507")
architecture = dict(_base_="qwen3_4b", max_position_embeddings=262144)
