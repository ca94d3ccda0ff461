"""BLOOM 560M, BigScience's base model of 46 languages."""

model = dict(path="bigscience/bloom-560m", chat_template="vicuna")
architecture = dict(
    model_type="bloom",
    num_hidden_layers=24,
    hidden_size=1024,
    num_attention_heads=16,
    vocab_size=250880,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
)
