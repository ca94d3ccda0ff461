"""Code Llama 7B, Meta's base model, trained on code."""

model = dict(path="codellama/CodeLlama-7b-hf", chat_template="llama2")
architecture = dict(_base_="llama_7b", vocab_size=32016, max_position_embeddings=16384)
