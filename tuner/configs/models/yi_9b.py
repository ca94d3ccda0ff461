"""Yi 9B, 01.AI's base model of English and Chinese."""

model = dict(path="01-ai/Yi-9B", chat_template="chatml")
architecture = dict(_base_="yi_6b", num_hidden_layers=48)
