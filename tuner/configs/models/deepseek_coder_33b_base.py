"""DeepSeek Coder 33B, DeepSeek's base model for code."""

model = dict(path="deepseek-ai/deepseek-coder-33b-base", chat_template="deepseek_coder")
architecture = dict(
    _base_="yi_34b", num_hidden_layers=62, intermediate_size=19200, vocab_size=32256, max_position_embeddings=16384
)
