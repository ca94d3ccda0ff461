"""Mistral Nemo 12B Instruct, Mistral AI's and NVIDIA's chat model."""

model = dict(path="mistralai/Mistral-Nemo-Instruct-2407")
architecture = "mistral_nemo_12b"
