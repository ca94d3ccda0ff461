"""Vicuna 7B v1.5, LMSYS's chat model, built on Llama 2."""

model = dict(path="lmsys/vicuna-7b-v1.5", chat_template="vicuna")
architecture = dict(
    model_type="llama",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    vocab_size=32000,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
)
