"""Vicuna 7B v1.5, LMSYS's chat model, built on Llama 2."""

model = dict(path="lmsys/vicuna-7b-v1.5", chat_template="vicuna")
architecture = "llama2_7b"
