"""Mistral Small 22B Instruct 2409, Mistral AI's chat model."""

model = dict(path="mistralai/Mistral-Small-Instruct-2409")
architecture = "codestral_22b"
