"""SmolLM2 360M Instruct, Hugging Face's small chat model of the second generation."""

model = dict(path="HuggingFaceTB/SmolLM2-360M-Instruct")
architecture = "smollm2_360m"
