"""Pythia 12B, EleutherAI's base model for the study of training."""

model = dict(path="EleutherAI/pythia-12b", chat_template="vicuna")
architecture = dict(
    model_type="gpt_neox",
    num_hidden_layers=36,
    hidden_size=5120,
    intermediate_size=20480,
    num_attention_heads=40,
    vocab_size=50688,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
)
