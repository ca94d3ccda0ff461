"""SmolLM2 1.7B, Hugging Face's small base model of the second generation."""

model = dict(path="HuggingFaceTB/SmolLM2-1.7B", chat_template="chatml")
architecture = dict(_base_="smollm_1_7b", max_position_embeddings=8192)
