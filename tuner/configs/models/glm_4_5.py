"""GLM-4.5 355B-A32B, Z.ai's chat model with 160 experts that can think first."""

model = dict(path="zai-org/GLM-4.5")
architecture = dict(
    _base_="glm_4_5_air",
    num_hidden_layers=92,
    hidden_size=5120,
    intermediate_size=12288,
    use_qk_norm=True,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    first_k_dense_replace=3,
)
