"""Gemma 4 E4B Instruct, Google's chat model that also sees and hears; its text half."""

model = dict(path="google/gemma-4-E4B-it")
architecture = dict(
    model_type="gemma4_text",
    num_hidden_layers=42,
    hidden_size=2560,
    intermediate_size=10240,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    vocab_size=262144,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
    hidden_size_per_layer_input=256,
    vocab_size_per_layer_input=262144,
    num_kv_shared_layers=18,
    global_head_dim=512,
)
