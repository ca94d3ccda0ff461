"""GPT-2 355M, OpenAI's base model of 2019."""

model = dict(path="openai-community/gpt2-medium", chat_template="vicuna")
architecture = dict(_base_="gpt2", num_hidden_layers=24, hidden_size=1024, num_attention_heads=16)
