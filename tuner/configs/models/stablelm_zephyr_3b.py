"""StableLM Zephyr 3B, Stability AI's chat model."""

model = dict(path="stabilityai/stablelm-zephyr-3b")
architecture = "stablelm_3b_4e1t"
