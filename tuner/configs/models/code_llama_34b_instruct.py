"""Code Llama 34B Instruct, Meta's chat model for code."""

model = dict(path="codellama/CodeLlama-34b-Instruct-hf")
architecture = "code_llama_34b"
