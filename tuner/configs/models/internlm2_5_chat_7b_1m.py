"""InternLM2.5-Chat 7B 1M, Shanghai AI Laboratory's chat model for long contexts."""

model = dict(path="internlm/internlm2_5-7b-chat-1m", chat_template="internlm2")
architecture = dict(_base_="internlm2_7b", max_position_embeddings=262144)
