"""Pythia 6.9B, EleutherAI's base model for the study of training."""

model = dict(path="EleutherAI/pythia-6.9b", chat_template="vicuna")
architecture = dict(
    model_type="gpt_neox",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=16384,
    num_attention_heads=32,
    vocab_size=50432,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
)
