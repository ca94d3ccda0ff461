"""Yi-1.5 34B Chat, 01.AI's chat model of the first generation's update."""

model = dict(path="01-ai/Yi-1.5-34B-Chat")
architecture = dict(
    model_type="llama",
    num_hidden_layers=60,
    hidden_size=7168,
    intermediate_size=20480,
    num_attention_heads=56,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=64000,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
)
