"""Zephyr 7B Beta, Hugging Face's chat model, built on Mistral 7B."""

model = dict(path="HuggingFaceH4/zephyr-7b-beta")
architecture = "mistral_7b"
