"""SmolLM 135M Instruct, Hugging Face's small chat model."""

model = dict(path="HuggingFaceTB/SmolLM-135M-Instruct")
architecture = "smollm_135m"
