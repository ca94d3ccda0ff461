"""Mistral Small 3 24B, Mistral AI's base model."""

model = dict(path="mistralai/Mistral-Small-24B-Base-2501", chat_template="mistral")
architecture = dict(_base_="mistral_nemo_12b", intermediate_size=32768, max_position_embeddings=32768)
