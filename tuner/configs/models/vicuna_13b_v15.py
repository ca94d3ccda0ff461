"""Vicuna 13B v1.5, LMSYS's chat model, built on Llama 2."""

model = dict(path="lmsys/vicuna-13b-v1.5", chat_template="vicuna")
architecture = "llama2_13b"
