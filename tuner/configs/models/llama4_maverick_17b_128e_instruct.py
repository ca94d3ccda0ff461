"""Llama 4 Maverick Instruct, Meta's chat model of 402B with 128 experts, 17B active; its text half."""

model = dict(path="meta-llama/Llama-4-Maverick-17B-128E-Instruct")
architecture = dict(
    _base_="llama4_scout_17b_16e_instruct",
    max_position_embeddings=1048576,
    num_local_experts=128,
    interleave_moe_layer_step=2,
)
