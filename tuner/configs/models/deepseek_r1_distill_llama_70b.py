"""DeepSeek-R1 Distill Llama 70B, Llama 3.3 taught to think by DeepSeek-R1."""

model = dict(path="deepseek-ai/DeepSeek-R1-Distill-Llama-70B")
architecture = dict(
    model_type="llama",
    num_hidden_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
)
