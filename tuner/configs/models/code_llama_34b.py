"""Code Llama 34B, Meta's base model, trained on code."""

model = dict(path="codellama/CodeLlama-34b-hf", chat_template="llama2")
architecture = dict(_base_="llama2_70b", num_hidden_layers=48, intermediate_size=22016, max_position_embeddings=16384)
