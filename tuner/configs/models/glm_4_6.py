"""GLM-4.6 355B-A32B, Z.ai's chat model with 160 experts that can think first."""

model = dict(path="zai-org/GLM-4.6")
architecture = dict(_base_="glm_4_5", max_position_embeddings=202752)
