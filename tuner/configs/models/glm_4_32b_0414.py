"""GLM-4 32B 0414, Z.ai's chat model."""

model = dict(path="zai-org/GLM-4-32B-0414")
architecture = dict(
    _base_="glm_4_9b_0414",
    num_hidden_layers=61,
    hidden_size=6144,
    intermediate_size=23040,
    num_attention_heads=48,
    attention_bias=False,
)
