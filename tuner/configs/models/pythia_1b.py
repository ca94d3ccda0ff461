"""Pythia 1B, EleutherAI's base model for the study of training."""

model = dict(path="EleutherAI/pythia-1b", chat_template="vicuna")
architecture = dict(
    model_type="gpt_neox",
    num_hidden_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=8,
    vocab_size=50304,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
)
