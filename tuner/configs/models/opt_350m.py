"""OPT 350M, Meta's base model of 2022."""

model = dict(path="facebook/opt-350m", chat_template="vicuna")
architecture = dict(
    _base_="opt_6_7b",
    num_hidden_layers=24,
    hidden_size=1024,
    num_attention_heads=16,
    word_embed_proj_dim=512,
    do_layer_norm_before=False,
    ffn_dim=4096,
)
