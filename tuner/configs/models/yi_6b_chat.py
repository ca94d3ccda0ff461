"""Yi 6B Chat, 01.AI's chat model of English and Chinese."""

model = dict(path="01-ai/Yi-6B-Chat")
architecture = "yi_6b"
