"""Llama 3.3 70B Instruct, Meta's chat model of the third generation's last update."""

model = dict(path="meta-llama/Llama-3.3-70B-Instruct", chat_template="llama3_1")
architecture = "llama3_1_70b"
