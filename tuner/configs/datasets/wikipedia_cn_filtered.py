"""Chinese Wikipedia of July 2023, filtered, 254,547 articles; plain text."""

train_dataloader = dict(
    dataset=dict(path="pleisto/wikipedia-cn-20230720-filtered", format="text", columns=dict(text="completion"))
)
