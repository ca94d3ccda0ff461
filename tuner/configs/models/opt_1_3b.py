"""OPT 1.3B, Meta's base model of 2022."""

model = dict(path="facebook/opt-1.3b", chat_template="vicuna")
architecture = dict(_base_="opt_6_7b", num_hidden_layers=24, hidden_size=2048, ffn_dim=8192)
