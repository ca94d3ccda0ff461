"""Phi-2 2.7B, Microsoft's base model, trained on textbooks and the web."""

model = dict(path="microsoft/phi-2", chat_template="vicuna")
architecture = dict(
    model_type="phi",
    num_hidden_layers=32,
    hidden_size=2560,
    intermediate_size=10240,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=51200,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
)
