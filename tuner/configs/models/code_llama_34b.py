"""Code Llama 34B, Meta's base model, trained on code."""

model = dict(path="codellama/CodeLlama-34b-hf", chat_template="llama2")
architecture = dict(
    model_type="llama",
    num_hidden_layers=48,
    hidden_size=8192,
    intermediate_size=22016,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    tie_word_embeddings=False,
    max_position_embeddings=16384,
)
