"""GLM-Z1 9B 0414, Z.ai's chat model that thinks first."""

model = dict(path="zai-org/GLM-Z1-9B-0414")
architecture = "glm_4_9b_0414"
