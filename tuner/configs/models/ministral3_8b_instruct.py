"""Ministral 3 8B Instruct, Mistral AI's chat model that also sees; its text half; 8-bit weights."""

model = dict(path="mistralai/Ministral-3-8B-Instruct-2512")
architecture = "ministral3_8b"
