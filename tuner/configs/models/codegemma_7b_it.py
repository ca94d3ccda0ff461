"""CodeGemma 7B Instruct, Google's chat model for code; it does not support system turns."""

model = dict(path="google/codegemma-7b-it")
architecture = "gemma_7b"
