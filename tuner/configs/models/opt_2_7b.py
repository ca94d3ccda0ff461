"""OPT 2.7B, Meta's base model of 2022."""

model = dict(path="facebook/opt-2.7b", chat_template="vicuna")
architecture = dict(_base_="opt_6_7b", hidden_size=2560, ffn_dim=10240)
