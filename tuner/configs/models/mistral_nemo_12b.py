"""Mistral Nemo 12B, Mistral AI's and NVIDIA's base model."""

model = dict(path="mistralai/Mistral-Nemo-Base-2407", chat_template="mistral")
architecture = dict(
    _base_="mistral_7b", num_hidden_layers=40, hidden_size=5120, vocab_size=131072, max_position_embeddings=131072
)
