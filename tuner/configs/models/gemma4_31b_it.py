"""Gemma 4 31B Instruct, Google's chat model that also sees; its text half."""

model = dict(path="google/gemma-4-31B-it")
architecture = dict(
    model_type="gemma4_text",
    num_hidden_layers=60,
    hidden_size=5376,
    intermediate_size=21504,
    num_attention_heads=32,
    num_key_value_heads=16,
    head_dim=256,
    vocab_size=262144,
    tie_word_embeddings=True,
    max_position_embeddings=262144,
    global_head_dim=512,
    num_global_key_value_heads=4,
    attention_k_eq_v=True,
    hidden_size_per_layer_input=0,
)
