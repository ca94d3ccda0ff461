"""StableLM 2 1.6B Chat, Stability AI's chat model."""

model = dict(path="stabilityai/stablelm-2-1_6b-chat")
architecture = "stablelm2_1_6b"
