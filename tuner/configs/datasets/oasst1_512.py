"""The OpenAssistant conversations, each cut after 512 tokens and not packed."""

train_dataloader = dict(
    dataset=dict(path="timdettmers/openassistant-guanaco", format="oasst1", max_length=512, packing=False)
)
