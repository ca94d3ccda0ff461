"""StableLM 2 Zephyr 1.6B, Stability AI's chat model."""

model = dict(path="stabilityai/stablelm-2-zephyr-1_6b")
architecture = "stablelm2_1_6b"
