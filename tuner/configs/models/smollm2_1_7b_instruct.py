"""SmolLM2 1.7B Instruct, Hugging Face's small chat model of the second generation."""

model = dict(path="HuggingFaceTB/SmolLM2-1.7B-Instruct")
architecture = "smollm2_1_7b"
