"""StarCoderBase 1B, BigCode's small base model for code."""

model = dict(path="bigcode/starcoderbase-1b", chat_template="vicuna")
architecture = dict(
    model_type="gpt_bigcode",
    num_hidden_layers=24,
    hidden_size=2048,
    num_attention_heads=16,
    vocab_size=49152,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    multi_query=True,
)
