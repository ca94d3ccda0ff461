"""Pythia 160M, EleutherAI's base model for the study of training."""

model = dict(path="EleutherAI/pythia-160m", chat_template="vicuna")
architecture = dict(
    model_type="gpt_neox",
    num_hidden_layers=12,
    hidden_size=768,
    intermediate_size=3072,
    num_attention_heads=12,
    vocab_size=50304,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
)
