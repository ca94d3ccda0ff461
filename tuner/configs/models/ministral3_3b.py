"""Ministral 3 3B, Mistral AI's small base model that also sees; its text half; sizes from memory."""

model = dict(path="mistralai/Ministral-3-3B-Base-2512")
architecture = dict(
    _base_="ministral3_8b", num_hidden_layers=26, hidden_size=3072, intermediate_size=9216, tie_word_embeddings=True
)
