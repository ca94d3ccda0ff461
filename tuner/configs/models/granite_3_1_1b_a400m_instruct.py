"""Granite 3.1 1B-A400M Instruct, IBM's chat model with 32 experts."""

model = dict(path="ibm-granite/granite-3.1-1b-a400m-instruct")
architecture = dict(
    model_type="granitemoe",
    num_hidden_layers=24,
    hidden_size=1024,
    intermediate_size=512,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=49155,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
    num_experts_per_tok=8,
    num_local_experts=32,
)
