"""GPT-2 124M, OpenAI's base model of 2019."""

model = dict(path="openai-community/gpt2", chat_template="vicuna")
architecture = dict(
    model_type="gpt2",
    num_hidden_layers=12,
    hidden_size=768,
    num_attention_heads=12,
    vocab_size=50257,
    tie_word_embeddings=True,
    max_position_embeddings=1024,
)
