"""Yi 34B Chat, 01.AI's chat model of English and Chinese."""

model = dict(path="01-ai/Yi-34B-Chat")
architecture = "yi_34b"
