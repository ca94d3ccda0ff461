"""BLOOM 7.1B, BigScience's base model of 46 languages."""

model = dict(path="bigscience/bloom-7b1", chat_template="vicuna")
architecture = dict(
    model_type="bloom",
    num_hidden_layers=30,
    hidden_size=4096,
    num_attention_heads=32,
    vocab_size=250880,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
)
