"""SmolLM 360M, Hugging Face's small base model, trained on text."""

model = dict(path="HuggingFaceTB/SmolLM-360M", chat_template="chatml")
architecture = dict(
    _base_="smollm_135m",
    num_hidden_layers=32,
    hidden_size=960,
    intermediate_size=2560,
    num_attention_heads=15,
    num_key_value_heads=5,
)
