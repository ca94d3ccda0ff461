"""Yi-1.5 6B, 01.AI's base model of the first generation's update."""

model = dict(path="01-ai/Yi-1.5-6B", chat_template="chatml")
architecture = "yi_6b"
