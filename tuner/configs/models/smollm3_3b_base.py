"""SmolLM3 3B Base, Hugging Face's open base model."""

model = dict(path="HuggingFaceTB/SmolLM3-3B-Base")
architecture = "smollm3_3b"
