"""SmolLM2 360M, Hugging Face's small base model of the second generation."""

model = dict(path="HuggingFaceTB/SmolLM2-360M", chat_template="chatml")
architecture = dict(_base_="smollm_360m", max_position_embeddings=8192)
