"""Code Llama 13B, Meta's base model, trained on code."""

model = dict(path="codellama/CodeLlama-13b-hf", chat_template="llama2")
architecture = dict(
    model_type="llama",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=13824,
    num_attention_heads=40,
    num_key_value_heads=40,
    head_dim=128,
    vocab_size=32016,
    tie_word_embeddings=False,
    max_position_embeddings=16384,
)
