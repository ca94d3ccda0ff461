"""SmolTalk, the mix behind SmolLM2-Instruct; 1.04 million conversations; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="HuggingFaceTB/smoltalk", name="all", format="messages"))
