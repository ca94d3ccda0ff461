"""Llama 3.2 1B, Meta's smallest base model."""

model = dict(path="meta-llama/Llama-3.2-1B", chat_template="llama3_1")
architecture = dict(_base_="llama3_2_3b", num_hidden_layers=16, hidden_size=2048, num_attention_heads=32, head_dim=64)
