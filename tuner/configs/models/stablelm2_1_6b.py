"""StableLM 2 1.6B, Stability AI's base model."""

model = dict(path="stabilityai/stablelm-2-1_6b", chat_template="zephyr")
architecture = dict(
    _base_="stablelm_3b_4e1t",
    num_hidden_layers=24,
    hidden_size=2048,
    intermediate_size=5632,
    vocab_size=100352,
    use_qkv_bias=True,
)
