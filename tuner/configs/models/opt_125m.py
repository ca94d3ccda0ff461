"""OPT 125M, Meta's base model of 2022."""

model = dict(path="facebook/opt-125m", chat_template="vicuna")
architecture = dict(_base_="opt_6_7b", num_hidden_layers=12, hidden_size=768, num_attention_heads=12, ffn_dim=3072)
