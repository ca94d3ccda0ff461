"""SmolLM 1.7B Instruct, Hugging Face's small chat model."""

model = dict(path="HuggingFaceTB/SmolLM-1.7B-Instruct")
architecture = "smollm_1_7b"
