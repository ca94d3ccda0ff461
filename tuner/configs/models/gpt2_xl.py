"""GPT-2 1.6B, OpenAI's base model of 2019."""

model = dict(path="openai-community/gpt2-xl", chat_template="vicuna")
architecture = dict(_base_="gpt2", num_hidden_layers=48, hidden_size=1600, num_attention_heads=25)
