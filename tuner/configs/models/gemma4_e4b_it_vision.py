"""Gemma 4 E4B Instruct with its vision tower, Google's chat model that reads images; what it hears is not trained."""

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
    vision_config=dict(
        model_type="gemma4",
        num_hidden_layers=16,
        hidden_size=768,
        intermediate_size=3072,
        num_attention_heads=12,
        patch_size=16,
        merge_size=3,
        num_tokens=280,
        num_parameters_of_sound=308_756_768,
    ),
)
