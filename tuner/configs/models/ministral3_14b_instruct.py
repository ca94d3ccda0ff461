"""Ministral 3 14B Instruct, Mistral AI's chat model that also sees; its text half; 8-bit weights; sizes from memory."""

model = dict(path="mistralai/Ministral-3-14B-Instruct-2512")
architecture = "ministral3_14b"
