"""SmolLM2 135M Instruct, Hugging Face's small chat model of the second generation."""

model = dict(path="HuggingFaceTB/SmolLM2-135M-Instruct")
architecture = "smollm2_135m"
