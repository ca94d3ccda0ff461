"""Yi 6B, 01.AI's base model of English and Chinese."""

model = dict(path="01-ai/Yi-6B", chat_template="chatml")
architecture = dict(_base_="llama_7b", num_key_value_heads=4, vocab_size=64000, max_position_embeddings=4096)
