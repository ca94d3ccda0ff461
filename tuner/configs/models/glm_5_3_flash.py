"""GLM-5.3 Flash, Z.ai's small chat model that reads images; planned from its config.json."""

model = dict(path="zai-org/GLM-5.3-Flash")
