"""Code Llama 13B Instruct, Meta's chat model for code."""

model = dict(path="codellama/CodeLlama-13b-Instruct-hf")
architecture = "code_llama_13b"
