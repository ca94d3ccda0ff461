"""Gemma 4 E2B Instruct, Google's chat model that also sees and hears; its text half."""

model = dict(path="google/gemma-4-E2B-it")
architecture = dict(
    model_type="gemma4_text",
    num_hidden_layers=35,
    hidden_size=1536,
    intermediate_size=6144,
    num_attention_heads=8,
    num_key_value_heads=1,
    head_dim=256,
    vocab_size=262144,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
    full_attention_interval=5,
    hidden_size_per_layer_input=256,
    vocab_size_per_layer_input=262144,
    num_kv_shared_layers=20,
    global_head_dim=512,
    use_double_wide_mlp=True,
)
