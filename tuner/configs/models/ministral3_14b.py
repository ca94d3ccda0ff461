"""Ministral 3 14B, Mistral AI's small base model that also sees; its text half; sizes from memory."""

model = dict(path="mistralai/Ministral-3-14B-Base-2512")
architecture = dict(_base_="ministral3_8b", num_hidden_layers=40, hidden_size=5120, intermediate_size=16384)
