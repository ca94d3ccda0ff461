"""Yi-1.5 6B Chat, 01.AI's chat model of the first generation's update."""

model = dict(path="01-ai/Yi-1.5-6B-Chat")
architecture = "yi_6b"
