"""DeepSeek-R1 Distill Qwen 32B, Qwen2.5 taught to think by DeepSeek-R1."""

model = dict(path="deepseek-ai/DeepSeek-R1-Distill-Qwen-32B")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=64,
    hidden_size=5120,
    intermediate_size=27648,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=152064,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
)
