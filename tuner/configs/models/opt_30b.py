"""OPT 30B, Meta's base model of 2022."""

model = dict(path="facebook/opt-30b", chat_template="vicuna")
architecture = dict(_base_="opt_6_7b", num_hidden_layers=48, hidden_size=7168, num_attention_heads=56, ffn_dim=28672)
