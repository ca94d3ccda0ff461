"""Code Llama 7B Instruct, Meta's chat model for code."""

model = dict(path="codellama/CodeLlama-7b-Instruct-hf")
architecture = "code_llama_7b"
