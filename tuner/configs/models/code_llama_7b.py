"""Code Llama 7B, Meta's base model, trained on code."""

model = dict(path="codellama/CodeLlama-7b-hf", chat_template="llama2")
architecture = dict(
    model_type="llama",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    vocab_size=32016,
    tie_word_embeddings=False,
    max_position_embeddings=16384,
)
