"""SmolLM 1.7B, Hugging Face's small base model, trained on text."""

model = dict(path="HuggingFaceTB/SmolLM-1.7B", chat_template="chatml")
architecture = dict(
    _base_="smollm_135m",
    num_hidden_layers=24,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=32,
)
