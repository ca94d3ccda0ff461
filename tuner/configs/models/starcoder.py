"""StarCoder 15.5B, BigCode's base model for code."""

model = dict(path="bigcode/starcoder", chat_template="xtuner_default")
architecture = dict(_base_="starcoderbase_1b", num_hidden_layers=40, hidden_size=6144, num_attention_heads=48)
