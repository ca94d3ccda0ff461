"""Granite 3.1 3B-A800M Instruct, IBM's chat model with 40 experts."""

model = dict(path="ibm-granite/granite-3.1-3b-a800m-instruct")
architecture = dict(
    model_type="granitemoe",
    num_hidden_layers=32,
    hidden_size=1536,
    intermediate_size=512,
    num_attention_heads=24,
    num_key_value_heads=8,
    vocab_size=49155,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
    num_experts_per_tok=8,
    num_local_experts=40,
)
