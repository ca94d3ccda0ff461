"""SmolTalk's shorter part, for models below one billion parameters; 460,341 conversations; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="HuggingFaceTB/smol-smoltalk", format="messages"))
