"""GPT-NeoX 20B, EleutherAI's base model."""

model = dict(path="EleutherAI/gpt-neox-20b", chat_template="vicuna")
architecture = dict(
    _base_="pythia_6_9b", num_hidden_layers=44, hidden_size=6144, intermediate_size=24576, num_attention_heads=64
)
