"""SmolLM 360M Instruct, Hugging Face's small chat model."""

model = dict(path="HuggingFaceTB/SmolLM-360M-Instruct")
architecture = "smollm_360m"
