"""OPT 13B, Meta's base model of 2022."""

model = dict(path="facebook/opt-13b", chat_template="vicuna")
architecture = dict(_base_="opt_6_7b", num_hidden_layers=40, hidden_size=5120, num_attention_heads=40, ffn_dim=20480)
