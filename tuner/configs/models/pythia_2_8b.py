"""Pythia 2.8B, EleutherAI's base model for the study of training."""

model = dict(path="EleutherAI/pythia-2.8b", chat_template="vicuna")
architecture = dict(
    model_type="gpt_neox",
    num_hidden_layers=32,
    hidden_size=2560,
    intermediate_size=10240,
    num_attention_heads=32,
    vocab_size=50304,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
)
