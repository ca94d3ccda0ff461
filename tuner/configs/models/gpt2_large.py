"""GPT-2 774M, OpenAI's base model of 2019."""

model = dict(path="openai-community/gpt2-large", chat_template="vicuna")
architecture = dict(_base_="gpt2", num_hidden_layers=36, hidden_size=1280, num_attention_heads=20)
