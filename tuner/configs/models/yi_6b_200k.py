"""Yi 6B 200K, 01.AI's base model with a context of 200 thousand tokens."""

model = dict(path="01-ai/Yi-6B-200K", chat_template="chatml")
architecture = dict(_base_="yi_6b", max_position_embeddings=200000)
