"""GLM-4.7 355B-A32B, Z.ai's chat model with 160 experts that can think first; sizes from memory."""

model = dict(path="zai-org/GLM-4.7")
architecture = "glm_4_6"
